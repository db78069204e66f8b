#!/bin/sh
# Installs what building and testing need beside a Rust toolchain: Debian packages, nothing else.
# Quick when everything is there. Without root it says what is missing.
set -eu

# gcc, libc6-dev: linking, and the C parts of zstd and blake3. acl, attr, libarchive-tools, zstd: the tools that the
# tests compare with. e2fsprogs, mount, util-linux: the slow disk of the demonstration, and disks behind a cache; btrfs-progs:
# those that are cloned while programs write, or have a quota. git, make, rsync, sqlite3, hdf5-tools with the python3
# that calls its library: programs that run on a cache. fio, libhdf5-mpich-103-1 with the MPI that it stands on: jobs whose use
# of files is to be told. iproute2, procps: the testbed.
# glusterfs-*, ceph-*, python3-*: the engines. munge, slurm*: what a cluster has. mariadb-*, slurmdbd: its accounting;
# the packages with -core come without a service. lua5.3: what Slurm's scripts are tested with. curl: what a document
# tells to type.
packages="curl gcc libc6-dev make acl attr tar libarchive-tools zstd e2fsprogs mount util-linux btrfs-progs
    git rsync sqlite3 hdf5-tools python3 fio libhdf5-mpich-103-1 iproute2 procps
    glusterfs-server glusterfs-client
    ceph-mon ceph-osd ceph-mds ceph-fuse ceph-common python3-rados python3-cephfs
    munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins
    mariadb-server-core mariadb-client-core slurmdbd slurm-wlm-mysql-plugin lua5.3"

missing=""
for package in $packages; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "setup: this is not Debian; install the equivalent of:$missing" >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "setup: missing Debian packages; as root, run: apt-get install$missing" >&2
    exit 1
fi
echo "setup: installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # a list of words
apt-get install -y -qq --no-install-recommends $missing >/dev/null
