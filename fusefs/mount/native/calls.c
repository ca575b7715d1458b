/* System calls, made without the interpreter's lock: nothing of Python's is touched here. */
#include "core.h"

#include <sys/fsuid.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>

#define WANTED (STATX_BASIC_STATS | STATX_BTIME)
static const int64_t NANO = 1000000000;

/* What a name in a directory is, or what an fd holds if that is "". Returns 0 or an errno. */
int look(int fd, const char *name, int flags, Seen *seen) {
    struct statx told;
    if (statx(fd, name, flags | AT_SYMLINK_NOFOLLOW | (*name ? 0 : AT_EMPTY_PATH), WANTED, &told) < 0)
        return errno;
    seen->dev = makedev(told.stx_dev_major, told.stx_dev_minor);
    seen->ino = told.stx_ino;
    seen->size = told.stx_size;
    seen->blocks = told.stx_blocks;
    seen->rdev = makedev(told.stx_rdev_major, told.stx_rdev_minor);
    seen->mode = told.stx_mode;
    seen->nlink = told.stx_nlink;
    seen->uid = told.stx_uid;
    seen->gid = told.stx_gid;
    seen->blksize = told.stx_blksize;
    seen->atime_s = told.stx_atime.tv_sec, seen->atime_ns = told.stx_atime.tv_nsec;
    seen->mtime_s = told.stx_mtime.tv_sec, seen->mtime_ns = told.stx_mtime.tv_nsec;
    seen->ctime_s = told.stx_ctime.tv_sec, seen->ctime_ns = told.stx_ctime.tv_nsec;
    seen->btime_ns = told.stx_mask & STATX_BTIME ? told.stx_btime.tv_sec * NANO + told.stx_btime.tv_nsec : 0;
    return 0;
}

/* The file handle of what was looked at just now. Returns 0 or an errno. */
int handle_of(int fd, const char *name, int flags, Seen *seen) {
    int mount_id;
    seen->handle.n_bytes = HANDLE_BYTES;
    return name_to_handle_at(fd, name, (struct file_handle *)&seen->handle, &mount_id, flags) < 0 ? errno : 0;
}

/* What a name is and its file handle: both of one inode, whatever is renamed meanwhile. Returns 0 or an errno. */
int peek(int dir_fd, const char *name, int flags, Seen *seen) {
    int fd = openat(dir_fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno;
    int error = look(fd, "", flags, seen);
    if (!error)
        error = handle_of(fd, "", AT_EMPTY_PATH, seen);
    close(fd);
    return error;
}

/* The same in half of the time: of one inode if nobody renames meanwhile. Returns 0 or an errno. */
int identify(int dir_fd, const char *name, int flags, Seen *seen) {
    int error = look(dir_fd, name, flags, seen);
    return error ? error : handle_of(dir_fd, name, 0, seen);
}

/* Whose the inode is that an fd holds. Returns 0 or an errno. */
int owner_of(int fd, uint32_t *uid) {
    struct stat found;
    if (fstat(fd, &found) < 0)
        return errno;
    *uid = found.st_uid;
    return 0;
}

static int take_up(const char *sets) {
    static const uint32_t header[2] = {0x20080522, 0};
    return syscall(SYS_capset, header, sets);
}

/* From now on this thread acts as a user alone: with no group but its own, and no capability. Returns 0 or an errno;
 * in either case act_end must follow. */
int act_begin(const Core *core, Actor *actor) {
    if (actor->makes)
        actor->umask_before = umask(actor->umask);
    if (!core->acts_as_others)
        return 0;
    if (actor->gid)
        actor->gid_before = setfsgid(actor->gid);
    if (actor->uid)
        actor->uid_before = setfsuid(actor->uid);
    else if (!actor->keeps_capabilities && take_up(core->no_capabilities) < 0)
        return errno;
    if ((actor->gid && (uint32_t)setfsgid(-1) != actor->gid) || (actor->uid && (uint32_t)setfsuid(-1) != actor->uid))
        return EPERM;
    return 0;
}

/* The thread is itself again; or the process ends: nothing may be done as the wrong one. */
void act_end(const Core *core, const Actor *actor) {
    static const char told[] = "trashd: a thread did not get its own identity back\n";
    bool is_itself = true;
    if (core->acts_as_others) {
        if (actor->uid)
            setfsuid(actor->uid_before);
        if (actor->gid)
            setfsgid(actor->gid_before);
        if (!actor->uid && !actor->keeps_capabilities)
            is_itself = take_up(core->at_rest) == 0;
        is_itself &= !(actor->gid && (uint32_t)setfsgid(-1) != actor->gid_before);
        is_itself &= !(actor->uid && (uint32_t)setfsuid(-1) != actor->uid_before);
    }
    if (actor->makes)
        umask(actor->umask_before);
    if (!is_itself) {
        if (write(2, told, sizeof told - 1)) {
        }
        _exit(70);
    }
}
