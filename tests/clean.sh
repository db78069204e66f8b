#!/bin/sh
# Removes what a crashed test, benchmark or demonstration left: mounts, loop devices, control groups, directories.
# It touches nothing whose name is not ours.
set -u

# Innermost mounts first.
for mount in $(awk '$5 ~ /ondeck-(bench|demo)/ {print $5}' /proc/self/mountinfo | sort -r); do
    umount "$mount" 2>/dev/null || umount -l "$mount"
    echo "unmounted $mount"
done
for image in $(losetup -n -O BACK-FILE 2>/dev/null | grep 'ondeck-\(bench\|demo\)'); do
    losetup -n -O NAME -j "$image" | xargs -r losetup -d
    echo "detached $image"
done
for group in /sys/fs/cgroup/blkio/ondeck-* /sys/fs/cgroup/ondeck-*; do
    [ -d "$group" ] && rmdir "$group" && echo "removed $group"
done
for directory in /tmp/ondeck-bench* /tmp/ondeck-demo* /var/tmp/ondeck-bench* /var/tmp/ondeck-demo* \
    /dev/shm/ondeck-bench* /dev/shm/ondeck-demo*; do
    [ -e "$directory" ] && rm -rf --one-file-system "$directory" && echo "removed $directory"
done
exit 0
