#!/bin/sh
# Removes what a crashed test, benchmark or demonstration left: mounts, loop devices, control groups, directories.
# It touches nothing whose name is not ours. (Hosts of a testbed end with their test, whatever happens; only its directory
# can stay.)
set -u

# Names end in the process id of their maker; what a living one uses stays.
in_use() {
    pid=$(printf '%s' "$1" | sed -n 's/.*ondeck-\(bench\|demo\|testbed\|test\)\.\([0-9]*\).*/\2/p')
    [ -n "$pid" ] && [ -d "/proc/$pid" ]
}

# Servers of caches and keepers of runs, which outlive the test that has started them: they keep their state in its directory.
for environment in /proc/[0-9]*/environ; do
    # Some have ended meanwhile, and kernel threads have none.
    state=$({ tr '\0' '\n' < "$environment"; } 2>/dev/null | sed -n 's/^ONDECK_STATE_DIR=\(.*ondeck-test\..*\)/\1/p')
    [ -n "$state" ] && ! in_use "$state" || continue
    pid=${environment#/proc/}
    kill -KILL "${pid%/environ}" 2>/dev/null && echo "ended process ${pid%/environ}, of $state"
done
# Innermost mounts first.
for mount in $(awk '$5 ~ /ondeck-(bench|demo|test\.)/ {print $5}' /proc/self/mountinfo | sort -r); do
    in_use "$mount" && continue
    umount "$mount" 2>/dev/null || umount -l "$mount"
    echo "unmounted $mount"
done
losetup -n -O NAME,MAJ:MIN,BACK-FILE 2>/dev/null | grep 'ondeck-\(bench\|demo\|test\.\)' | while read -r device number image; do
    in_use "$image" && continue
    # The demonstration's throttle and write-back limits stay with the device's number.
    for limit in /sys/fs/cgroup/blkio/blkio.throttle.read_bps_device /sys/fs/cgroup/blkio/blkio.throttle.write_bps_device; do
        [ -w "$limit" ] && echo "$number 0" > "$limit"
    done
    [ -w "/sys/class/bdi/$number/strict_limit" ] && echo 0 > "/sys/class/bdi/$number/strict_limit"
    losetup -d "$device"
    echo "detached $image"
done
for group in /sys/fs/cgroup/blkio/ondeck-* /sys/fs/cgroup/memory/ondeck-cache-* /sys/fs/cgroup/ondeck-*; do
    [ -d "$group" ] && rmdir "$group" && echo "removed $group"
done
# Those of testbeds' hosts: what is frozen there can't even be killed.
for bed in /sys/fs/cgroup/freezer/ondeck-testbed.*; do
    [ -d "$bed" ] && ! in_use "$bed" || continue
    find "$bed" -depth -type d | while read -r group; do
        [ "$(cat "$group/freezer.state")" = THAWED ] || echo THAWED > "$group/freezer.state"
    done
    find "$bed" -depth -type d | while read -r group; do rmdir "$group"; done
    [ -d "$bed" ] || echo "removed $bed"
done
# Those that hold some of their programs to a share of a processor.
for bed in /sys/fs/cgroup/cpu/ondeck-testbed.* /sys/fs/cgroup/ondeck-testbed.*; do
    [ -d "$bed" ] && ! in_use "$bed" || continue
    find "$bed" -depth -type d | while read -r group; do rmdir "$group"; done
    [ -d "$bed" ] || echo "removed $bed"
done
for directory in /tmp/ondeck-bench* /tmp/ondeck-demo* /var/tmp/ondeck-bench* /var/tmp/ondeck-demo* \
    /dev/shm/ondeck-bench* /dev/shm/ondeck-demo* /tmp/ondeck-testbed.* /tmp/ondeck-test.* /dev/shm/ondeck-test.*; do
    [ -e "$directory" ] && ! in_use "$directory" || continue
    # Some tests make what even root can't remove.
    chattr -R -f -ia "$directory" 2>/dev/null
    rm -rf --one-file-system "$directory" && echo "removed $directory"
done
exit 0
