/* System calls, made without the interpreter's lock: nothing here touches Python objects. */
#include "core.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>

#define STATX_MASK (STATX_BASIC_STATS | STATX_BTIME)

/* Stat a name in a directory, or if the name is "", the inode of the fd. Returns 0 or an errno. */
int stat_at(int fd, const char *name, int flags, Stat *st) {
    struct statx found;
    if (statx(fd, name, (flags & ~WITHOUT_HANDLES) | AT_SYMLINK_NOFOLLOW | (*name ? 0 : AT_EMPTY_PATH), STATX_MASK,
              &found) < 0)
        return errno;
    st->dev = makedev(found.stx_dev_major, found.stx_dev_minor);
    st->ino = found.stx_ino;
    st->size = found.stx_size;
    st->blocks = found.stx_blocks;
    st->rdev = makedev(found.stx_rdev_major, found.stx_rdev_minor);
    st->mode = found.stx_mode;
    st->nlink = found.stx_nlink;
    st->uid = found.stx_uid;
    st->gid = found.stx_gid;
    st->blksize = found.stx_blksize;
    st->atime_s = found.stx_atime.tv_sec, st->atime_ns = found.stx_atime.tv_nsec;
    st->mtime_s = found.stx_mtime.tv_sec, st->mtime_ns = found.stx_mtime.tv_nsec;
    st->ctime_s = found.stx_ctime.tv_sec, st->ctime_ns = found.stx_ctime.tv_nsec;
    st->handle.n_bytes = 0;
    st->btime_ns = found.stx_mask & STATX_BTIME ? in_ns(found.stx_btime.tv_sec, found.stx_btime.tv_nsec) : 0;
    return 0;
}

/* Get the file handle of an inode that was just stat'ed, if it has one that never becomes another inode's. Returns 0
 * or an errno. */
int fetch_file_handle(int fd, const char *name, int flags, Stat *st) {
    int mount_id, error = EOPNOTSUPP;
    st->handle.n_bytes = HANDLE_BYTES;
    if (!(flags & WITHOUT_HANDLES))
        error = name_to_handle_at(fd, name, (struct file_handle *)&st->handle, &mount_id, *name ? 0 : AT_EMPTY_PATH) < 0
                    ? errno
                    : 0;
    if (!error)
        return 0;
    st->handle.n_bytes = 0;
    return error == EOPNOTSUPP || error == EPERM || error == ENOSYS || error == EOVERFLOW ? 0 : error;
}

/* Stat a name in a directory, or if the name is "", the inode of the fd, and get its file handle. The results belong to
 * one inode unless the name is changed meanwhile. Returns 0 or an errno. */
int stat_with_handle(int fd, const char *name, int flags, Stat *st) {
    int error = stat_at(fd, name, flags, st);
    return error ? error : fetch_file_handle(fd, name, flags, st);
}

/* Do the same as `stat_with_handle`, only for a name, in twice the time: the results belong to one inode even after
 * renames. */
int stat_opened(int dir_fd, const char *name, int flags, Stat *st) {
    int fd = openat(dir_fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno;
    int error = stat_with_handle(fd, "", flags, st);
    close(fd);
    return error;
}

/* Return how often this thread has waited in the kernel. */
static long n_voluntary_switches(void) {
    struct rusage used;
    return getrusage(RUSAGE_THREAD, &used) < 0 ? -1 : used.ru_nvcsw;
}

/* Start to time some stats, which may show how fast the filesystem is. */
StatTimer start_stat_timer(const Core *core) {
    bool is_in_doubt = __atomic_load_n(&core->is_in_doubt, __ATOMIC_RELAXED);
    return (StatTimer){.ns = now_ns(), .n_waits = is_in_doubt ? n_voluntary_switches() : -1, .is_meaningful = true};
}

void stop_stat_timer(const Core *core, StatTimer *timer, int n) {
    timer->ns = now_ns() - timer->ns;
    if (timer->n_waits >= 0 && timer->ns > n * core->quick_ns)
        timer->is_meaningful = n_voluntary_switches() != timer->n_waits;
}
