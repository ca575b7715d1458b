/* System calls, made without the interpreter's lock: nothing here touches Python objects. */
#include "core.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>

#define WANTED (STATX_BASIC_STATS | STATX_BTIME)

/* Stat a name in a directory, or if the name is "" the inode of the fd. Returns 0 or an errno. */
int look(int fd, const char *name, int flags, Seen *seen) {
    struct statx found;
    if (statx(fd, name, (flags & ~WITHOUT_HANDLES) | AT_SYMLINK_NOFOLLOW | (*name ? 0 : AT_EMPTY_PATH), WANTED, &found) < 0)
        return errno;
    seen->dev = makedev(found.stx_dev_major, found.stx_dev_minor);
    seen->ino = found.stx_ino;
    seen->size = found.stx_size;
    seen->blocks = found.stx_blocks;
    seen->rdev = makedev(found.stx_rdev_major, found.stx_rdev_minor);
    seen->mode = found.stx_mode;
    seen->nlink = found.stx_nlink;
    seen->uid = found.stx_uid;
    seen->gid = found.stx_gid;
    seen->blksize = found.stx_blksize;
    seen->atime_s = found.stx_atime.tv_sec, seen->atime_ns = found.stx_atime.tv_nsec;
    seen->mtime_s = found.stx_mtime.tv_sec, seen->mtime_ns = found.stx_mtime.tv_nsec;
    seen->ctime_s = found.stx_ctime.tv_sec, seen->ctime_ns = found.stx_ctime.tv_nsec;
    seen->handle.n_bytes = 0;
    seen->btime_ns = found.stx_mask & STATX_BTIME ? in_ns(found.stx_btime.tv_sec, found.stx_btime.tv_nsec) : 0;
    return 0;
}

/* Get the file handle of what was just stat'ed, if it has one that stays the same inode's. Returns 0 or an errno. */
int handle_of(int fd, const char *name, int flags, Seen *seen) {
    int mount_id, error = EOPNOTSUPP;
    seen->handle.n_bytes = HANDLE_BYTES;
    if (!(flags & WITHOUT_HANDLES))
        error = name_to_handle_at(fd, name, (struct file_handle *)&seen->handle, &mount_id, *name ? 0 : AT_EMPTY_PATH) < 0
                    ? errno
                    : 0;
    if (!error)
        return 0;
    seen->handle.n_bytes = 0;
    return error == EOPNOTSUPP || error == EPERM || error == ENOSYS || error == EOVERFLOW ? 0 : error;
}

/* Stat a name in a directory, or if the name is "" the inode of the fd, and get its file handle. The results belong to
 * one inode unless the name is changed meanwhile. Returns 0 or an errno. */
int identify(int fd, const char *name, int flags, Seen *seen) {
    int error = look(fd, name, flags, seen);
    return error ? error : handle_of(fd, name, flags, seen);
}

/* As `identify`, for a name only, in twice the time: the results belong to one inode whatever is renamed meanwhile. */
int peek(int dir_fd, const char *name, int flags, Seen *seen) {
    int fd = openat(dir_fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno;
    int error = identify(fd, "", flags, seen);
    close(fd);
    return error;
}

/* Return how often this thread has waited in the kernel. */
static long n_waits(void) {
    struct rusage used;
    return getrusage(RUSAGE_THREAD, &used) < 0 ? -1 : used.ru_nvcsw;
}

/* Start to time some stats, which may show how fast the filesystem is. */
Timed time_begin(const Core *core) {
    bool is_in_doubt = __atomic_load_n(&core->is_in_doubt, __ATOMIC_RELAXED);
    return (Timed){.ns = now_ns(), .n_waits = is_in_doubt ? n_waits() : -1, .tells = true};
}

/* Stop timing n stats. */
void time_end(const Core *core, Timed *timed, int n) {
    timed->ns = now_ns() - timed->ns;
    if (timed->n_waits >= 0 && timed->ns > n * core->quick_ns)
        timed->tells = n_waits() != timed->n_waits;
}
