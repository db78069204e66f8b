"""Makes the pools and the filesystem of a new cluster, and waits until it serves.

The OSDs 0 to NODES-1 hold data; with --metadata-stores, NODES to 2*NODES-1 hold metadata, each kind under its own
CRUSH rule. Speaks to the monitor through librados, over one connection.
"""

import argparse
import errno
import faulthandler
import json
import sys
import time

import cephfs
import rados

parser = argparse.ArgumentParser()
parser.add_argument("conf")
parser.add_argument("--filesystem", required=True)
parser.add_argument("--nodes", type=int, required=True)
parser.add_argument("--metadata-stores", action="store_true")
parser.add_argument("--root", required=True)
parser.add_argument("--quota", required=True)
parser.add_argument("--files", required=True)
parser.add_argument("--seconds", type=float, required=True)
options = parser.parse_args()
deadline = time.monotonic() + options.seconds
# Calls of librados and libcephfs may wait for ever: then it is told which one did.
faulthandler.dump_traceback_later(options.seconds + 1, exit=True)

cluster = rados.Rados(conffile=options.conf, name="client.admin")
cluster.connect(timeout=max(1, int(options.seconds)))


def tell(prefix, **arguments):
    code, output, message = cluster.mon_command(json.dumps({"prefix": prefix, **arguments}), b"")
    if code != 0:
        sys.exit(f"{prefix} {arguments}: {message or code}")
    return output


def ask(prefix):
    return json.loads(tell(prefix, format="json"))


def wait(what, ready):
    while not ready():
        if time.monotonic() > deadline:
            sys.exit(f"waited in vain for {what}")
        time.sleep(0.005)


def active():
    ranks = (info for fs in ask("fs dump")["filesystems"] for info in fs["mdsmap"]["info"].values())
    return any(info["state"] == "up:active" for info in ranks)


stores = options.nodes * (2 if options.metadata_stores else 1)
wait("the stores", lambda: ask("osd stat")["num_up_osds"] >= stores)
rules = {}
if options.metadata_stores:
    for kind, first in (("data", 0), ("metadata", options.nodes)):
        ids = [str(number) for number in range(first, first + options.nodes)]
        tell("osd crush rm-device-class", ids=ids)
        tell("osd crush set-device-class", **{"class": kind}, ids=ids)
        tell("osd crush rule create-replicated", name=kind, root="default", type="osd", **{"class": kind})
        rules[kind] = {"rule": kind}
groups = 32 * options.nodes
tell("osd pool create", pool="metadata", pg_num=8, pgp_num=8, **rules.get("metadata", {}))
# The more there are for each node, the more evenly objects are spread.
tell("osd pool create", pool="data", pg_num=groups, pgp_num=groups, **rules.get("data", {}))
wait("a metadata server", lambda: len(ask("fs dump")["standbys"]) > 0)
tell("fs new", fs_name=options.filesystem, metadata="metadata", data="data", force=True)
wait("the metadata server", active)

filesystem = cephfs.LibCephFS(rados_inst=cluster)
filesystem.mount()


def knows_snapshots():
    code, _, message = filesystem.mds_command("*", json.dumps({"prefix": "dump snaps"}), b"")
    if code not in (0, -errno.EINVAL):
        sys.exit(f"dump snaps: {message or code}")
    return code == 0


# One that is active still asks itself for its table of snapshots, and aborts if a directory is made before it has it.
wait("the metadata server's table of snapshots", knows_snapshots)
filesystem.mkdir(options.root, 0o700)
filesystem.setxattr(options.root, "ceph.quota.max_bytes", options.quota.encode(), 0)
filesystem.setxattr(options.root, "ceph.quota.max_files", options.files.encode(), 0)
filesystem.unmount()
