BEGIN TRANSACTION;
CREATE TABLE jobs (id TEXT PRIMARY KEY, job TEXT NOT NULL);
INSERT INTO jobs VALUES('2@1000000000','{"id":"2@1000000000","owner":{"uid":1000,"gid":1000},"account":"","request":{"data_in":["/home/anna/in"],"data_out":[],"stage_in":null,"stage_out":null,"delay":null,"capacity":null,"nodes":null,"pool":null,"engine":null,"pack":null,"wait":null,"out_size":null,"copy_out_interval":null},"work_dir":"/","compute_nodes":1,"nodes":[],"ended_on":[],"ending":null,"qos":"","priority":1,"submitted":1000000000,"noted":[1000000000],"job_state":"ONDECK","rsa_state":"INITIAL","since":1000000000000,"purpose":"input","allocation":null,"io_nodes":[],"results":false,"abandoned":false,"torn":false,"task":null,"failures":0,"failed_here":false,"hopeless":false,"avoid":[],"broken":false,"broken_why":"","lost_on":[],"parts":{},"salvage":false,"mount_failed":false,"unmounts":0,"stage_outs":0,"not_before":null,"retry_now":false,"prolog":"expected","prolog_until":null,"started":null,"switch_at":null,"delay_over":false,"doubted":null,"locked_in":false,"unlocking":false,"held":false,"hold_seen":false,"let_go":false,"released":false,"older":false,"unsure":false,"still_runs":false,"again_since":null,"message":"","waits_for":"insufficient free RSA nodes for job 2, have 0 need 1"}');
INSERT INTO jobs VALUES('1@1000000000','{"id":"1@1000000000","owner":{"uid":1000,"gid":1000},"account":"","request":{"data_in":[],"data_out":["/home/anna/out"],"stage_in":null,"stage_out":null,"delay":null,"capacity":null,"nodes":null,"pool":null,"engine":null,"pack":null,"wait":null,"out_size":null,"copy_out_interval":null},"work_dir":"/","compute_nodes":1,"nodes":["c1"],"ended_on":[],"ending":null,"qos":"","priority":1,"submitted":1000000000,"noted":[1000000000],"job_state":"RUNNING","rsa_state":"INUSE_OUT","since":1000000004000,"purpose":"output","allocation":{"nodes":["r1"],"promise":1073741824,"epoch":1000000000000001,"since":1000000000000},"io_nodes":["c1"],"results":true,"abandoned":false,"torn":false,"task":null,"failures":0,"failed_here":false,"hopeless":false,"avoid":[],"broken":false,"broken_why":"","lost_on":[],"parts":{},"salvage":false,"mount_failed":false,"unmounts":0,"stage_outs":0,"not_before":null,"retry_now":false,"prolog":"over","prolog_until":null,"started":1000000003000,"switch_at":1000000303000,"delay_over":false,"doubted":null,"locked_in":false,"unlocking":false,"held":false,"hold_seen":false,"let_go":false,"released":false,"older":false,"unsure":false,"still_runs":false,"again_since":null,"message":"","waits_for":""}');
CREATE TABLE past_jobs (id TEXT PRIMARY KEY, job TEXT NOT NULL, ended_ms INTEGER NOT NULL);
CREATE TABLE nodes (name TEXT PRIMARY KEY, node TEXT NOT NULL);
INSERT INTO nodes VALUES('r1','{"pool":"default","capacity":1073741824,"up":true,"drained":"","promised":{"1@1000000000":1073741824},"residue":[],"failures":0,"heard":true}');
CREATE TABLE ramdisks (id TEXT PRIMARY KEY, job TEXT NOT NULL, secret TEXT NOT NULL, layout TEXT);
INSERT INTO ramdisks VALUES('job-1-1000000000-0@1000000000000001','1@1000000000','7f50d8f4f70c1edb87348780700f468fd2c4515c894aab7a82bd594ff62d07d0',NULL);
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO counters VALUES('task',3);
INSERT INTO counters VALUES('epoch',1000000000000001);
INSERT INTO counters VALUES('clock last',1000000008000);
CREATE TABLE journal (
        number INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL,
        job TEXT, job_state TEXT, rsa_state TEXT, text TEXT NOT NULL);
INSERT INTO journal VALUES(1,1000000000000,NULL,NULL,NULL,'RSA node r1 lends 1 GiB');
INSERT INTO journal VALUES(2,1000000000000,'1@1000000000','ONDECK','INITIAL','on deck');
INSERT INTO journal VALUES(3,1000000000000,'2@1000000000','ONDECK','INITIAL','on deck');
INSERT INTO journal VALUES(4,1000000000000,'1@1000000000','ONDECK','ASSIGNED','assigning 1 rsa-nodes to job 1');
INSERT INTO journal VALUES(5,1000000000000,'1@1000000000','ONDECK','BOOTING','');
INSERT INTO journal VALUES(6,1000000000000,'2@1000000000','ONDECK','INITIAL','waits: 1 of 1 RSA nodes stage for other jobs, and half of them are for jobs that run');
INSERT INTO journal VALUES(7,1000000001000,'1@1000000000','ONDECK','BOOTED','done 1');
INSERT INTO journal VALUES(8,1000000001000,'1@1000000000','ONDECK','STAGING_IN','preparing its output directories');
INSERT INTO journal VALUES(9,1000000002000,'1@1000000000','ONDECK','READY','done 2');
INSERT INTO journal VALUES(10,1000000003000,'1@1000000000','RUNNING','READY','job 1 runs');
INSERT INTO journal VALUES(11,1000000003000,'1@1000000000','RUNNING','MOUNTING','');
INSERT INTO journal VALUES(12,1000000003000,'2@1000000000','ONDECK','INITIAL','waits: insufficient free RSA nodes for job 2, have 0 need 1');
INSERT INTO journal VALUES(13,1000000004000,'1@1000000000','RUNNING','INUSE_OUT','done 4');
CREATE TABLE used (uid INTEGER NOT NULL, account TEXT NOT NULL, day INTEGER NOT NULL,
        node_seconds REAL NOT NULL, allocations INTEGER NOT NULL, PRIMARY KEY (uid, account, day));
CREATE TABLE strays (node TEXT PRIMARY KEY, ramdisks TEXT NOT NULL);
CREATE TABLE set_aside
    (kind TEXT NOT NULL, id TEXT NOT NULL, row TEXT NOT NULL, why TEXT NOT NULL, at_ms INTEGER NOT NULL);
CREATE TABLE parts
    (job TEXT NOT NULL, node TEXT NOT NULL, at_ms INTEGER NOT NULL, names TEXT NOT NULL, PRIMARY KEY (job, node));
CREATE INDEX journal_of_job ON journal (job, number);
CREATE TRIGGER journal_is_kept BEFORE UPDATE ON journal BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
COMMIT;
PRAGMA user_version = 2;
