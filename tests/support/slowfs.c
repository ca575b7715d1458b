/* A FUSE filesystem, passing everything through, as slow as a network: for tests and benchmarks.
 *
 *     slowfs SOURCE MOUNT_POINT CONTROL [THREADS]
 *
 * THREADS are the requests that it works on at a time: with few of them it is a server that has a capacity.
 * CONTROL is a file of at least sizeof(struct control) bytes that both sides map: how slow it is, what hangs, and what
 * was asked so far. It may be changed at any time. A byte is written to standard output for each request that begins to
 * hang. Stays in the foreground. Sees one filesystem only, and holds an O_PATH fd for each inode that the kernel knows.
 *
 * The number of a node is that of the inode, and its generation comes from the inode's birth: so a file handle means
 * one incarnation of one inode, whatever was forgotten in between.
 */
#include "slowfs.h"

#include <err.h>
#include <linux/fuse.h>
#include <linux/securebits.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/uio.h>

enum { N_THREADS = 256, N_FDS = 1 << 20 };

static void slow_init(void *data, struct fuse_conn_info *connection)
{
    (void)data;
    connection->want &= ~FUSE_CAP_HANDLE_KILLPRIV; /* our writes, being root's, would leave suid bits */
    connection->want |= connection->capable & FUSE_CAP_PARALLEL_DIROPS; /* not by default since libfuse 3.17 */
}

static void slow_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    if (begin(req, OP_lookup, parent, name))
        return;
    reply_found(req, parent, name);
}

static void slow_forget(fuse_req_t req, fuse_ino_t ino, uint64_t n_lookups)
{
    forget(ino, n_lookups);
    fuse_reply_none(req);
}

static void slow_forget_multi(fuse_req_t req, size_t n, struct fuse_forget_data *forgets)
{
    for (size_t i = 0; i < n; i++)
        forget(forgets[i].ino, forgets[i].nlookup);
    fuse_reply_none(req);
}

static void slow_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file)
{
    (void)file;
    if (begin(req, OP_getattr, ino, NULL))
        return;
    reply_attributes(req, ino);
}

static struct timespec time_to_set(struct timespec given, int is_set, int is_now)
{
    return is_now ? (struct timespec){.tv_nsec = UTIME_NOW} : is_set ? given : (struct timespec){.tv_nsec = UTIME_OMIT};
}

static int set(fuse_ino_t ino, struct stat *wanted, int what, struct fuse_file_info *file)
{
    char path[PATH_SIZE];
    path_of(ino, path);
    uid_t uid = what & FUSE_SET_ATTR_UID ? wanted->st_uid : (uid_t)-1;
    gid_t gid = what & FUSE_SET_ATTR_GID ? wanted->st_gid : (gid_t)-1;
    int times = FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME | FUSE_SET_ATTR_ATIME_NOW | FUSE_SET_ATTR_MTIME_NOW;
    struct timespec both[2] = {
        time_to_set(wanted->st_atim, what & FUSE_SET_ATTR_ATIME, what & FUSE_SET_ATTR_ATIME_NOW),
        time_to_set(wanted->st_mtim, what & FUSE_SET_ATTR_MTIME, what & FUSE_SET_ATTR_MTIME_NOW),
    };
    if (what & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID) && fchownat(fd_of(ino), "", uid, gid, AT_EMPTY_PATH))
        return -1;
    if (what & FUSE_SET_ATTR_MODE && chmod(path, wanted->st_mode & 07777))
        return -1;
    if (what & FUSE_SET_ATTR_SIZE &&
        (file ? ftruncate((int)file->fh, wanted->st_size) : truncate(path, wanted->st_size)))
        return -1;
    return what & times ? utimensat(AT_FDCWD, path, both, 0) : 0;
}

static void slow_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *wanted, int what, struct fuse_file_info *file)
{
    if (begin(req, OP_setattr, ino, NULL))
        return;
    if (set(ino, wanted, what, file))
        done(req, -1);
    else
        reply_attributes(req, ino);
}

static void slow_readlink(fuse_req_t req, fuse_ino_t ino)
{
    char target[4097];
    if (begin(req, OP_readlink, ino, NULL))
        return;
    ssize_t size = readlinkat(fd_of(ino), "", target, sizeof target - 1);
    if (size < 0) {
        done(req, -1);
        return;
    }
    target[size] = '\0';
    end();
    fuse_reply_readlink(req, target);
}

static void reply_made(fuse_req_t req, fuse_ino_t parent, const char *name, int result)
{
    act_as_root();
    if (result < 0)
        done(req, result);
    else
        reply_found(req, parent, name);
}

static void slow_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t number)
{
    if (begin(req, OP_mknod, parent, name))
        return;
    act_as(req);
    reply_made(req, parent, name, mknodat(fd_of(parent), name, mode, number));
}

static void slow_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode)
{
    if (begin(req, OP_mkdir, parent, name))
        return;
    act_as(req);
    reply_made(req, parent, name, mkdirat(fd_of(parent), name, mode));
}

static void slow_symlink(fuse_req_t req, const char *target, fuse_ino_t parent, const char *name)
{
    if (begin(req, OP_symlink, parent, name))
        return;
    act_as(req);
    reply_made(req, parent, name, symlinkat(target, fd_of(parent), name));
}

static void slow_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t parent, const char *name)
{
    char path[PATH_SIZE];
    if (begin(req, OP_link, parent, name))
        return;
    path_of(ino, path);
    reply_made(req, parent, name, linkat(AT_FDCWD, path, fd_of(parent), name, AT_SYMLINK_FOLLOW));
}

static void slow_unlink(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    if (begin(req, OP_unlink, parent, name))
        return;
    done(req, unlinkat(fd_of(parent), name, 0));
}

static void slow_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    if (begin(req, OP_rmdir, parent, name))
        return;
    done(req, unlinkat(fd_of(parent), name, AT_REMOVEDIR));
}

static void slow_rename(
    fuse_req_t req, fuse_ino_t parent, const char *name, fuse_ino_t new_parent, const char *new_name, unsigned flags)
{
    if (begin(req, OP_rename, parent, name))
        return;
    done(req, renameat2(fd_of(parent), name, fd_of(new_parent), new_name, flags));
}

static void slow_statfs(fuse_req_t req, fuse_ino_t ino)
{
    struct statvfs st;
    if (begin(req, OP_statfs, ino, NULL))
        return;
    if (fstatvfs(fd_of(ino), &st)) {
        done(req, -1);
        return;
    }
    end();
    fuse_reply_statfs(req, &st);
}

static struct fuse_lowlevel_ops all_handlers(void)
{
    struct fuse_lowlevel_ops handlers = file_handlers;
    handlers.init = slow_init;
    handlers.lookup = slow_lookup;
    handlers.forget = slow_forget;
    handlers.forget_multi = slow_forget_multi;
    handlers.getattr = slow_getattr;
    handlers.setattr = slow_setattr;
    handlers.readlink = slow_readlink;
    handlers.mknod = slow_mknod;
    handlers.mkdir = slow_mkdir;
    handlers.symlink = slow_symlink;
    handlers.link = slow_link;
    handlers.unlink = slow_unlink;
    handlers.rmdir = slow_rmdir;
    handlers.rename = slow_rename;
    handlers.statfs = slow_statfs;
    return handlers;
}

static void map_control(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    control = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (control == MAP_FAILED)
        err(1, "%s", path);
    close(fd);
#define NAME(what) strcpy(control->counters[OP_##what].name, #what);
    OPERATIONS(NAME)
}

#if FUSE_VERSION < FUSE_MAKE_VERSION(3, 17)
/* libfuse before 3.17 does not pass FUSE_CAP_PARALLEL_DIROPS to the kernel, so the reply to INIT gets the flag here. */
static ssize_t answer(int fd, struct iovec *parts, int n_parts, void *data)
{
    static atomic_flag is_told = ATOMIC_FLAG_INIT;
    (void)data;
    if (n_parts == 2 && !atomic_flag_test_and_set(&is_told))
        ((struct fuse_init_out *)parts[1].iov_base)->flags |= FUSE_PARALLEL_DIROPS;
    return writev(fd, parts, n_parts);
}

static ssize_t receive(int fd, void *buffer, size_t size, void *data)
{
    (void)data;
    return read(fd, buffer, size);
}

static void pass_parallel_dirops(void)
{
    const struct fuse_custom_io io = {.writev = answer, .read = receive};
    if (fuse_session_custom_io(session, &io, fuse_session_fd(session)))
        errx(1, "libfuse accepts no custom functions for reading and writing");
}
#else
static void pass_parallel_dirops(void)
{
}
#endif

static void have_fds(void)
{
    struct rlimit limit = {N_FDS, N_FDS};
    if (setrlimit(RLIMIT_NOFILE, &limit) && !getrlimit(RLIMIT_NOFILE, &limit)) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

int main(int argc, char **argv)
{
    if (argc != 4 && argc != 5)
        errx(2, "usage: slowfs SOURCE MOUNT_POINT CONTROL [THREADS]");
    unsigned n_threads = argc == 5 ? (unsigned)strtoul(argv[4], NULL, 10) : N_THREADS;
    open_root(argv[1]);
    map_control(argv[3]);
    have_fds();
    umask(0);
    /* So that act_as keeps root's capabilities: the caller may be in groups that are not ours. */
    if (geteuid() == 0 && prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP))
        err(1, "securebits");
    int by_user = control->xattrs & XATTRS_FOR_ROOT;
    char *checked = "-oallow_other,default_permissions,fsname=slowfs,subtype=slowfs";
    char *options[] = {argv[0], by_user ? "-oallow_other,fsname=slowfs,subtype=slowfs" : checked, NULL};
    struct fuse_lowlevel_ops handlers = all_handlers();
    struct fuse_args args = FUSE_ARGS_INIT(2, options);
    session = fuse_session_new(&args, &handlers, sizeof handlers, NULL);
    if (!session || fuse_set_signal_handlers(session) || fuse_session_mount(session, argv[2]))
        errx(1, "not mounted");
    pass_parallel_dirops();
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    fuse_loop_cfg_set_max_threads(config, n_threads);
    fuse_loop_cfg_set_idle_threads(config, n_threads);
    int result = fuse_session_loop_mt(session, config);
    fuse_loop_cfg_destroy(config);
    fuse_session_unmount(session);
    fuse_remove_signal_handlers(session);
    fuse_session_destroy(session);
    return result ? 1 : 0;
}
