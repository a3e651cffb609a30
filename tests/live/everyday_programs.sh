# Programs that people use every day. Each section runs in a shell of its own, as root, after what stands before
# the first of them. A section begins with `### its name`, then `# says:` and what its output has to contain.
set -e
cd "$(mktemp -d /tmp/work.XXXXXX)"
chmod 755 .

user() { id "$1" >/dev/null 2>&1 || adduser --quiet --disabled-password --gecos "" "$1" </dev/null; }

compiled() {
    echo '#include <stdio.h>
        int main(void) { puts("hi"); return 0; }' >a.c
    gcc -g "$@" -o a a.c
}

package() {
    mkdir -p p/DEBIAN p/usr/bin
    printf '#!/bin/sh\necho from a package\n' >"p/usr/bin/$1"
    printf '#!/bin/sh\nadduser --quiet --system made-by-%s\n' "$1" >p/DEBIAN/postinst
    printf 'Package: %s\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: d\n' "$1" >p/DEBIAN/control
    chmod 755 "p/usr/bin/$1" p/DEBIAN/postinst
    dpkg-deb --root-owner-group --build p "$1.deb" >/dev/null
}

### gcc
# says: hi
compiled
./a

### gcc with the address sanitizer
# says: hi
compiled -fsanitize=address
./a

### gcc with the thread sanitizer
# says: hi
compiled -fsanitize=thread
./a

### make
# says: made
printf 'all:\n\t@echo made\n' >Makefile
make -j2

### gdb
# says: Breakpoint 1, main
compiled
gdb -batch -ex 'break main' -ex run -ex bt ./a 2>&1

### gdb on a process that runs
# says: Inferior 1
compiled
sleep 9 &
gdb -batch -p $! 2>&1
kill $!

### strace
# says: exited with 0
compiled
strace -f ./a 2>&1

### valgrind
# says: ERROR SUMMARY: 0 errors
compiled
valgrind ./a 2>&1

### git
# says: first
git init -q g
git -C g -c user.email=a@b -c user.name=a commit -q --allow-empty -m first
git clone -q g copy
git -C copy gc -q
git -C copy log --oneline

### perl
# says: 42
perl -e 'open(F, ">x"); flock(F, 2); my $child = fork // die; $child or exit; wait; print 6 * 7'

### pip in a virtual environment
# says: 42
python3 -m venv v
mkdir k
echo 'x = 6 * 7' >k/zz.py
echo 'from setuptools import setup; setup(name="zz", version="1", py_modules=["zz"])' >k/setup.py
v/bin/pip install -q --no-index --no-build-isolation ./k
v/bin/python -c 'import zz; print(zz.x)'

### python with a pool of processes
# says: [7]
python3 -c 'import multiprocessing; print(multiprocessing.Pool(2).map(abs, [-7]))'

### python with shared memory and threads
# says: 42
python3 -c '
from multiprocessing.shared_memory import SharedMemory
from threading import Thread
shared = SharedMemory(create=True, size=9)
thread = Thread(target=lambda: shared.buf.__setitem__(0, 42))
thread.start(); thread.join()
print(shared.buf[0]); shared.unlink()'

### python with asyncio
# says: True
python3 -c 'import asyncio; print(asyncio.run(asyncio.create_subprocess_exec("true")).pid > 1)'

### node
# says: 42
node -e 'console.log(6 * 7)'

### node with a worker, a server and files
# says: served 12
node -e '
const {Worker} = require("worker_threads"), http = require("http"), fs = require("fs")
const server = http.createServer((ask, say) => fs.readFile("/etc/debian_version", (e, text) => say.end("served " + text)))
const ask = () => http.get("http://127.0.0.1:8080", got => { got.pipe(process.stdout); server.close() })
new Worker("1", {eval: true}).on("exit", () => server.listen(8080, ask))'

### dpkg
# says: from a package
package one
dpkg -i one.deb
one
id made-by-one
dpkg --purge one

### apt-get
# says: from a package
package two
apt-get install -y -q ./two.deb
two
apt-get purge -y -q two

### adduser and deluser
# says: no such user
user ann
deluser -q ann
id ann 2>&1 || true

### chpasswd and passwd
# says: bob P
user bob
echo bob:secret | chpasswd
passwd -S bob

### su
# says: /home/bob
user bob
su bob -c 'id -un'
su - bob -c pwd

### sudo, to another user
# says: bob
user bob
sudo -u bob id -un

### runuser and setpriv
# says: no_new_privs: 1
user bob
runuser -u bob -- setpriv --dump

### chown and chmod
# says: bob4755
user bob
touch q
chown bob:bob q
chmod 4755 q
stat -c %U%a q

### chroot
# says: 0
chroot / /usr/bin/id -u

### kill, of another user's process
# says: killed
user bob
su bob -c 'sleep 99' &
until pkill -x sleep -u bob; do sleep 0.05; done
wait $! || echo killed

### sshd and ssh
# says: bob
user bob
mkdir -p /run/sshd /home/bob/.ssh
ssh-keygen -A >/dev/null
ssh-keygen -q -t ed25519 -N '' -f k
cp k.pub /home/bob/.ssh/authorized_keys
chown -R bob:bob /home/bob/.ssh
/usr/sbin/sshd -p 2222
ssh -q -i k -o StrictHostKeyChecking=no -p 2222 bob@127.0.0.1 id -un
pkill -x sshd

### postgres
# says: 42
install -d -o postgres -g postgres /var/run/postgresql data
PATH=$PATH:$(echo /usr/lib/postgresql/*/bin)
su postgres -c "
    export PATH=$PATH
    initdb -D $PWD/data >/dev/null
    pg_ctl -w -D $PWD/data -l $PWD/data/log start >/dev/null
    psql -Atc 'select 40 + 2' postgres
    pg_ctl -D $PWD/data stop -m fast >/dev/null"

### redis
# says: 42
redis-server --port 6390 --daemonize yes >/dev/null
until redis-cli -p 6390 ping; do sleep 0.05; done
redis-cli -p 6390 set a 42
redis-cli -p 6390 bgsave
redis-cli -p 6390 get a
redis-cli -p 6390 shutdown

### tmux
# says: one: 1 windows
tmux -L t new -d -s one 'sleep 9'
tmux -L t ls
tmux -L t kill-server

### script, which makes a terminal
# says: /dev/pts/
script -qec 'tty; stty size' /dev/null

### ping
# says: 1 received
ping -c 1 -W 1 127.0.0.1

### ping, as a user
# says: 1 received
user bob
su bob -c 'ping -c 1 -W 1 127.0.0.1'

### a web server on port 80
# says: found
echo found >index.html
busybox httpd -p 127.0.0.1:80
busybox wget -qO- http://127.0.0.1/
pkill busybox

### ip and ss
# says: 127.0.0.1/8
ip -br address
ss -ltn

### ps, top, free, vmstat and uptime
# says: load average
ps aux
top -bn1
free -m
vmstat
uptime

### nice, renice, taskset and ionice
# says: new priority 7
nice -n 5 nice
renice -n 7 $$
taskset -p $$
ionice -c 3 -p $$

### tar with owners
# says: bob
user bob
touch f
chown bob f
tar cf t f
rm f
tar xf t
stat -c %U f

### dd, cp and sync
# says: same
dd if=/dev/zero of=z bs=1M count=8 conv=fsync
cp --reflink=auto z y
sync
sync y
cmp z y && echo same

### System V shared memory
# says: 4096
ipcmk -M 4096 >/dev/null
ipcs -m
ipcrm --all

### flock
# says: held
flock f -c 'flock -n f true || echo held'

### mount and df
# says: overlay on /
df -h /
mount

### chromium, told to do without its own sandbox
# says: <p>hey</p>
chromium-headless-shell --no-sandbox --disable-gpu --dump-dom 'data:text/html,<p>hey</p>' 2>/dev/null

### chromium in its own sandbox
# says: <p>hey</p>
# spec: user_namespaces
user bob
su bob -c "chromium-headless-shell --disable-gpu --dump-dom 'data:text/html,<p>hey</p>'" 2>/dev/null
