/* The launcher: what stands between an edge and bubblewrap.
 *
 * An edge starts some of these ahead of need. Each puts itself into the cgroups of its slot, makes the user namespace of its
 * sandbox, says that it is ready and waits: these are the slow parts of making a sandbox. When the edge says go it builds
 * the root file system in a private copy of the edge's template mount namespace, becomes the sandbox's own uid and turns into
 * bubblewrap. If the edge ends, however it ends, the socket ends too and a waiting launcher leaves.
 *
 *     launch BASE CGROUPS NAMESPACES
 *
 * BASE is the first uid of the sandbox's range, CGROUPS how many cgroup.procs files it is given, NAMESPACES the flags of those that
 * are made here, which are all but those of processes and mounts: bubblewrap makes these. Descriptors, fixed:
 *     0 1  /dev/null                5  the guest's program            8    (made here) the user namespace
 *     2    bubblewrap's complaints  6  the guest's listening socket   9..  cgroup.procs, open for writing; later
 *     3    control socket          7  bubblewrap's --info-fd              (made here) filters of system calls
 *     4    the template mount namespace
 *
 * Control socket (SOCK_SEQPACKET): this side sends one `struct report` each time; error 0 means ready. The edge sends one
 * message of NUL-terminated strings: the host name, the slot's directory, how many user namespaces there may be inside (nothing: as
 * many as on the host), the number of layers, each layer from the lowest up (paths in the template), the number of filters, the
 * file of each filter (the same), then the whole command line of bubblewrap. The socket closes when bubblewrap's exec has worked.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <net/if.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    FD_CONTROL = 3,
    FD_TEMPLATE = 4,
    FD_USERNS = 8,
    FD_CGROUPS = 9,
    FD_FILTERS = FD_CGROUPS,
};

#define UID_RANGE 65536u     /* uids of one sandbox */
#define GO_BYTES_MAX 65536   /* the edge's one message */
#define LAYERS_MAX 32        /* as many as the template has places for, /lower/0 and up */
#define ARGS_MAX 256         /* arguments of bubblewrap */
#define FILTERS_MAX 4
#define CGROUPS_MAX 16
#define FILES_SOFT 1024u         /* open files that a program has unless it asks for more, as on most systems */

struct report {
    int32_t error;
    char what[60];
    char path[256];
};

struct go {
    const char *hostname;
    const char *directory;
    const char *layers[LAYERS_MAX];
    size_t layer_count;
    const char *user_namespaces;
    const char *filters[FILTERS_MAX];
    size_t filter_count;
    char *argv[ARGS_MAX + 1];
};

/* What the process that makes the user namespace says of it. */
struct made {
    int error;
    int limit_fd; /* its descriptor of USER_NAMESPACES, which is a file of each user namespace's own */
};

/* The kernel's struct mount_attr and those of capset(2): the kernel's own headers are not there for every libc. */
struct mount_idmap {
    uint64_t set, clear, propagation, userns;
};
struct cap_header {
    uint32_t version;
    int pid;
};
struct cap_data {
    uint32_t effective, permitted, inheritable;
};
#define CAP_VERSION_3 0x20080522u
#define CAP_SYS_ADMIN_BIT (1u << 21)
#define IDMAP 0x00100000u          /* MOUNT_ATTR_IDMAP */
/* The machine has some thousands for all. */
#define TERMINALS "newinstance,ptmxmode=0666,mode=0620,max=128"
#define USER_NAMESPACES "/proc/sys/user/max_user_namespaces"
#define CLONE_TREE (1u | O_CLOEXEC) /* OPEN_TREE_CLONE */
#define FROM_EMPTY_PATH 0x4u       /* MOVE_MOUNT_F_EMPTY_PATH */

static void tell(int error, const char *what, const char *path)
{
    struct report report = {.error = error};
    snprintf(report.what, sizeof report.what, "%s", what);
    snprintf(report.path, sizeof report.path, "%s", path);
    /* If nobody listens there is nobody to tell. */
    (void)!send(FD_CONTROL, &report, sizeof report, MSG_NOSIGNAL);
}

__attribute__((noreturn)) static void give_up(const char *what, const char *path)
{
    tell(errno, what, path);
    _exit(1);
}

__attribute__((noreturn)) static void refuse(const char *what, const char *path)
{
    errno = EINVAL;
    give_up(what, path);
}

static void write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        give_up("open", path);
    if (write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        give_up("write", path);
    close(fd);
}

/* An edge needs many open files, and no sandbox has use for its core dumps; what is inside may raise both. */
static void set_soft_limits(void)
{
    struct rlimit files, core;

    if (getrlimit(RLIMIT_NOFILE, &files) || getrlimit(RLIMIT_CORE, &core))
        give_up("read", "resource limits");
    files.rlim_cur = files.rlim_max < FILES_SOFT ? files.rlim_max : FILES_SOFT;
    core.rlim_cur = 0;
    if (setrlimit(RLIMIT_NOFILE, &files) || setrlimit(RLIMIT_CORE, &core))
        give_up("set", "resource limits");
}

static unsigned long number(const char *text, unsigned long max)
{
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (errno || end == text || *end || value > max)
        refuse("read the number", text);
    return value;
}

static void join_cgroups(unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        int fd = FD_CGROUPS + (int)i;
        /* The kernel checks the one who opened the file, so this would work without root too. */
        if (write(fd, "0", 1) != 1) {
            char name[32], path[256] = "";
            snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
            (void)!readlink(name, path, sizeof path - 1);
            give_up("join the cgroup", path);
        }
        close(fd);
    }
}

/* Become BASE for good. */
static int become(uid_t base)
{
    return setgroups(0, NULL) || setresgid(base, base, base) || setresuid(base, base, base) ? -1 : 0;
}

/* The child whose user namespace we take; gives a descriptor of its USER_NAMESPACES. The namespace's owner must be BASE, or bubblewrap as BASE could not enter it. CAP_SYS_ADMIN is
 * kept over the change of uid because some kernels (AppArmor on Ubuntu) let nobody else make user namespaces. */
static int own_user_namespace(uid_t base, unsigned namespaces)
{
    struct cap_header head = {.version = CAP_VERSION_3};
    struct cap_data caps[2] = {{.effective = CAP_SYS_ADMIN_BIT, .permitted = CAP_SYS_ADMIN_BIT}};
    if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) || become(base) || syscall(SYS_capset, &head, caps))
        return -1;
    if (unshare((int)namespaces))
        return -1;
    return open(USER_NAMESPACES, O_WRONLY | O_CLOEXEC);
}

/* Gives a descriptor of the namespace's USER_NAMESPACES. */
static int make_user_namespace(uid_t base, unsigned namespaces)
{
    char path[64], map[64];
    struct made made;
    int pair[2];

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
        give_up("make a socket pair", "");
    pid_t child = fork();
    if (child < 0)
        give_up("fork", "");
    if (child == 0) {
        close(pair[0]);
        made.limit_fd = own_user_namespace(base, namespaces);
        made.error = made.limit_fd < 0 ? errno : 0;
        (void)!write(pair[1], &made, sizeof made);
        (void)!read(pair[1], &made, sizeof made); /* until the parent is done with us, or gone */
        _exit(0);
    }
    close(pair[1]);
    snprintf(map, sizeof map, "0 %u %u", base, UID_RANGE);
    if (read(pair[0], &made, sizeof made) != sizeof made)
        refuse("hear from the process that makes the user namespace", map);
    if (made.error) {
        errno = made.error;
        give_up("make the user namespace", map);
    }
    snprintf(path, sizeof path, "/proc/%d/uid_map", child);
    write_file(path, map);
    snprintf(path, sizeof path, "/proc/%d/gid_map", child);
    write_file(path, map);
    snprintf(path, sizeof path, "/proc/%d/ns/user", child);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || dup2(fd, FD_USERNS) < 0)
        give_up("open", path);
    close(fd);
    fd = (int)syscall(SYS_pidfd_open, child, 0u);
    unsigned others = namespaces & ~(unsigned)CLONE_NEWUSER;
    if (fd < 0 || (others && setns(fd, (int)others)))
        give_up("enter the namespaces of", path);
    int limit_fd = (int)syscall(SYS_pidfd_getfd, fd, made.limit_fd, 0u);
    if (limit_fd < 0)
        give_up("take over the descriptor of", USER_NAMESPACES);
    close(fd);
    close(pair[0]);
    while (waitpid(child, NULL, 0) < 0)
        if (errno != EINTR)
            give_up("wait for the process that made the user namespace", "");
    return limit_fd;
}

/* Its own network has only the loopback device. Programs of the sandbox may listen on any port and use ping. */
static void set_up_network(uid_t base)
{
    struct ifreq request = {.ifr_name = "lo"};
    char group_range[64];

    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, SIOCGIFFLAGS, &request))
        give_up("find the network device", request.ifr_name);
    request.ifr_flags = (short)(request.ifr_flags | IFF_UP | IFF_RUNNING);
    if (ioctl(fd, SIOCSIFFLAGS, &request))
        give_up("start the network device", request.ifr_name);
    close(fd);
    write_file("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
    snprintf(group_range, sizeof group_range, "%u %u", base, base + UID_RANGE - 1);
    write_file("/proc/sys/net/ipv4/ping_group_range", group_range);
}

static char *next_string(char **at, const char *end)
{
    char *string = *at;
    if (string == end)
        refuse("read the message to go: it ends early", "");
    *at += strlen(string) + 1;
    return string;
}

/* Cut the edge's message into its strings. */
static void read_go(struct go *go)
{
    static char text[GO_BYTES_MAX];
    ssize_t size;

    while ((size = recv(FD_CONTROL, text, sizeof text, MSG_TRUNC)) < 0)
        if (errno != EINTR)
            give_up("read from", "the control socket");
    if (size == 0)
        _exit(0); /* the edge is gone, or has no use for us */
    if ((size_t)size > sizeof text || text[size - 1])
        refuse("read the message to go", "");

    char *at = text, *end = text + size;
    go->hostname = next_string(&at, end);
    go->directory = next_string(&at, end);
    go->user_namespaces = next_string(&at, end);
    go->layer_count = number(next_string(&at, end), LAYERS_MAX);
    for (size_t i = 0; i < go->layer_count; i++)
        go->layers[i] = next_string(&at, end);
    go->filter_count = number(next_string(&at, end), FILTERS_MAX);
    for (size_t i = 0; i < go->filter_count; i++)
        go->filters[i] = next_string(&at, end);
    size_t arguments = 0;
    do {
        if (arguments == ARGS_MAX)
            refuse("read the message to go: too many arguments, at", at);
        go->argv[arguments++] = next_string(&at, end);
    } while (at < end);
    if (go->layer_count == 0)
        refuse("read the message to go: no layers for", go->directory);
}

/* A view of the layer in which its uid 0 is BASE, at /lower/INDEX. */
static void place_layer(const char *layer, size_t index, bool mapped)
{
    struct mount_idmap idmap = {.set = IDMAP, .userns = FD_USERNS};
    char place[32];

    int tree = (int)syscall(SYS_open_tree, AT_FDCWD, layer, CLONE_TREE);
    if (tree < 0)
        give_up("clone the mount of layer", layer);
    if (mapped && syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &idmap, sizeof idmap))
        give_up("map the owners of layer", layer);
    snprintf(place, sizeof place, "/lower/%zu", index);
    if (syscall(SYS_move_mount, tree, "", AT_FDCWD, place, FROM_EMPTY_PATH))
        give_up("mount a layer at", place);
    close(tree);
}

/* The sandbox's root, at /root of this namespace, and its terminals, at /pts. Every path in the options is one of the template's or relative, because
 * the sandbox can read them in its mountinfo. `volatile`: without it, taking the sandbox down syncs the host's whole disk. */
static void build_root(const struct go *go, bool mapped)
{
    char options[64 + LAYERS_MAX * 12];
    int used = snprintf(options, sizeof options, "volatile,upperdir=upper,workdir=work,lowerdir=");

    if (setns(FD_TEMPLATE, CLONE_NEWNS))
        give_up("enter", "the template mount namespace");
    if (unshare(CLONE_NEWNS))
        give_up("copy", "the template mount namespace");
    for (size_t i = 0; i < go->layer_count; i++)
        place_layer(go->layers[i], i, mapped);
    for (size_t i = go->layer_count; i-- > 0;) /* overlay wants the highest first */
        used += snprintf(options + used, sizeof options - (size_t)used, "/lower/%zu%s", i, i ? ":" : "");
    if (chdir(go->directory))
        give_up("enter", go->directory);
    if (mount("overlay", "/root", "overlay", 0, options))
        give_up("mount the overlay of", go->directory);
    if (chdir("/"))
        give_up("enter", "/");
    if (mount("devpts", "/pts", "devpts", MS_NOSUID | MS_NOEXEC, TERMINALS))
        give_up("mount terminals at", "/pts");
}

/* As the namespace's owner, who may do everything in it: the host's root need not have every capability. */
static void limit_user_namespaces(int fd, const char *most)
{
    ssize_t digits = (ssize_t)strlen(most);
    if (digits && write(fd, most, (size_t)digits) != digits)
        give_up("limit", USER_NAMESPACES);
    close(fd);
}

/* Each launcher opens the filters by itself: who shares a descriptor shares its place in the file too. */
static void open_filters(const struct go *go)
{
    for (size_t i = 0; i < go->filter_count; i++) {
        int fd = open(go->filters[i], O_RDONLY), place = FD_FILTERS + (int)i;
        if (fd < 0 || dup2(fd, place) < 0)
            give_up("open", go->filters[i]);
        if (fd != place)
            close(fd);
    }
}

int main(int argc, char **argv)
{
    struct go go = {0};

    if (argc != 4)
        refuse("start: wrong number of arguments to", argv[0] ? argv[0] : "launch");
    uid_t base = (uid_t)number(argv[1], UINT32_MAX);
    unsigned cgroups = (unsigned)number(argv[2], CGROUPS_MAX);
    unsigned namespaces = (unsigned)number(argv[3], INT32_MAX);
    bool mapped = namespaces & CLONE_NEWUSER;
    int limit_fd = -1;
    umask(022);
    set_soft_limits();
    setsid(); /* a Ctrl-C for the edge is none for its sandboxes */
    if (syscall(SYS_close_range, FD_CGROUPS + cgroups, ~0u, 0u) && errno != ENOSYS)
        give_up("close", "descriptors");
    if (fcntl(FD_CONTROL, F_SETFD, FD_CLOEXEC) || fcntl(FD_TEMPLATE, F_SETFD, FD_CLOEXEC))
        give_up("mark for closing", "descriptors");
    if (dup2(0, FD_USERNS) < 0) /* nothing else may take the number meanwhile */
        give_up("set aside", "a descriptor");

    join_cgroups(cgroups);
    if (mapped)
        limit_fd = make_user_namespace(base, namespaces);
    else if (unshare((int)namespaces))
        give_up("make", "namespaces");
    if (namespaces & CLONE_NEWNET)
        set_up_network(base);
    tell(0, "ready", "");

    read_go(&go);
    if (namespaces & CLONE_NEWUTS && sethostname(go.hostname, strlen(go.hostname)))
        give_up("set the host name", go.hostname);
    build_root(&go, mapped);
    if (become(base))
        give_up("take on the sandbox's uid", argv[1]);
    if (limit_fd >= 0)
        limit_user_namespaces(limit_fd, go.user_namespaces);
    open_filters(&go);
    execv(go.argv[0], go.argv);
    give_up("run", go.argv[0]);
}
