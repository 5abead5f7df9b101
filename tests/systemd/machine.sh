#!/bin/sh
# Runs Debian's systemd as PID 1 of private namespaces; ends it when standard input is closed.
# Usage: machine.sh DIRECTORY PROJECT TTY PREFIX; prints the pid of unshare, the parent of PID 1.
# DIRECTORY has units/, app/ and lib/. The caller is root, in a mount namespace of its own that does
# not propagate (machine.py says why each thing is here).
set -eu
dir=$1 project=$2 tty=$3 prefix=$4
export dir project tty prefix PATH

own=$(sed -n 's/^0:://p' /proc/self/cgroup)
mount -t cgroup2 none /sys/fs/cgroup
group=/sys/fs/cgroup${own%/}/gracekit-$$
mkdir "$group"
echo $$ > "$group/cgroup.procs"

unshare --cgroup --pid --mount --fork --kill-child --mount-proc --propagation private sh -euc '
umount /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys

mount -t tmpfs -o mode=755 none /run
mkdir /run/dev /run/units
mount -t tmpfs -o mode=755 none /run/dev
mkdir /run/dev/shm /run/dev/pts
for name in null zero full random urandom tty console; do : > /run/dev/$name; done
for name in null zero full random urandom tty; do mount --bind /dev/$name /run/dev/$name; done
mount --bind "$tty" /run/dev/console
ln -s /proc/self/fd /run/dev/fd
ln -s pts/ptmx /run/dev/ptmx
mount --move /run/dev /dev

mount --bind "$dir/units" /run/units
mount --bind "$dir/lib" /var/lib
mount -t tmpfs -o mode=755 none /srv
mkdir /srv/app /srv/project
mount --bind "$dir/app" /srv/app
mount --bind "$project" /srv/project
case "$prefix" in
    /root/*|/home/*)
        mkdir /run/prefix
        mount --bind "$prefix" /run/prefix
        home=/$(echo "$prefix" | cut -d / -f 2)
        mount -t tmpfs -o mode=755 none "$home"
        mkdir -p "$prefix"
        mount --move /run/prefix "$prefix"
        ;;
esac
mount -t tmpfs -o mode=1777 none /tmp
mount -t tmpfs -o mode=1777 none /var/tmp
cd /
exec env -i PATH="$PATH" container=lxc SYSTEMD_UNIT_PATH=/run/units \
    SYSTEMD_GENERATOR_PATH=/run/none SYSTEMD_LOG_TARGET=console \
    SYSTEMD_LOG_LEVEL=debug SYSTEMD_LOG_COLOR=0 SYSTEMD_LOG_TIME=1 \
    /lib/systemd/systemd --system --unit=basic.target --show-status=0
' < /dev/null >&2 &
outer=$!
echo $outer
cat > /dev/null

kill -KILL $outer 2> /dev/null || :
wait $outer 2> /dev/null || :
echo $$ > "${group%/*}/cgroup.procs"
for _ in 1 2 3 4 5 6 7 8 9 10; do
    find "$group" -depth -type d -exec rmdir {} + 2> /dev/null || sleep 0.1
    [ -e "$group" ] || exit 0
done
echo "$group is still in use" >&2
exit 1
