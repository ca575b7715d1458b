/* Attributes of nodes, and changes of them: GETATTR, STATX, ACCESS, SETATTR, STATFS. */
#include "core.h"

#include <stdio.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>

enum {
    MODE = 1 << 0, UID = 1 << 1, GID = 1 << 2, SIZE = 1 << 3, ATIME = 1 << 4, MTIME = 1 << 5, BY_HANDLE = 1 << 6,
    ATIME_NOW = 1 << 7, MTIME_NOW = 1 << 8, CHANGES = MODE | UID | GID | SIZE | ATIME | MTIME,
};
static const uint32_t BITS = S_ISUID | S_ISGID;

/* GETATTR, STATX. */

/* Stat a node; one that has ended has its last attributes. Called without the tables lock. Returns 0 or an errno. */
static int look_at_node(Request *request, Known *known, Seen *seen) {
    Core *core = request->core;
    int fd = -1, error = 0;
    if (known->fd != NULL || look_by_name(core, known, seen))
        error = reach(request->core, known, seen, &fd);
    if (fd >= 0)
        close(fd);
    if (!error)
        return 0;
    tables_lock(core->mutex);
    const Seen *last = known->node->last;
    if (last != NULL)
        *seen = *last;
    tables_unlock(core->mutex);
    return last == NULL ? error : 0;
}

/* Put struct fuse_statx_out. Returns its size. */
static int put_statx(Request *request, Node *node, const Seen *seen) {
    struct {
        uint64_t seconds;
        uint32_t ns, flags;
        uint64_t spare[2];
        struct statx found;
    } out = {0};
    char attr[ATTR_BYTES], *answer = request->answer;
    uint64_t number;
    request->answer = attr; /* for the attr timeout and the inode number */
    put_attr(request, node, seen, !is_unsteady(node));
    request->answer = answer;
    memcpy(&out, attr, sizeof out.seconds + sizeof out.ns);
    memcpy(&number, attr + 16, sizeof number);
    out.found = (struct statx){
        .stx_mask = STATX_BASIC_STATS | (seen->btime_ns ? STATX_BTIME : 0), .stx_blksize = seen->blksize,
        .stx_nlink = seen->nlink, .stx_uid = seen->uid, .stx_gid = seen->gid, .stx_mode = (uint16_t)seen->mode,
        .stx_ino = number, .stx_size = seen->size, .stx_blocks = seen->blocks,
        .stx_atime = {.tv_sec = seen->atime_s, .tv_nsec = seen->atime_ns},
        .stx_mtime = {.tv_sec = seen->mtime_s, .tv_nsec = seen->mtime_ns},
        .stx_ctime = {.tv_sec = seen->ctime_s, .tv_nsec = seen->ctime_ns},
        .stx_btime = {.tv_sec = seen->btime_ns / 1000000000, .tv_nsec = (uint32_t)(seen->btime_ns % 1000000000)},
        .stx_rdev_major = major(seen->rdev), .stx_rdev_minor = minor(seen->rdev),
    };
    memcpy(answer, &out, sizeof out);
    return sizeof out;
}

static int reply_attributes(Request *request, bool is_statx) {
    Known known;
    Seen seen;
    int result = open_known(request, request->nodeid, &known);
    if (result)
        return result;
    calls_begin(request);
    Timed timed = time_begin(request->core);
    int error = look_at_node(request, &known, &seen);
    time_end(request->core, &timed, 1);
    calls_end(request);
    tell_took(request, &timed, 1);
    if (error)
        result = -error;
    else {
        bool is_steady = !is_unsteady(known.node);
        known.node->is_told |= is_steady && !known.node->is_directory;
        request->is_fickle = !is_outside(request->core, known.node);
        result = is_statx ? put_statx(request, known.node, &seen) : put_attr(request, known.node, &seen, is_steady);
    }
    close_known(&known);
    return result;
}

int do_getattr(Request *request) { return reply_attributes(request, false); }
int do_statx(Request *request) { return reply_attributes(request, true); }

/* ACCESS, in a user's own mount: whether the daemon, which runs as that user, has access. */
int do_access(Request *request) {
    uint32_t mask;
    Known known;
    Seen seen;
    int fd;
    memcpy(&mask, request->own, sizeof mask);
    int result = open_known(request, request->nodeid, &known);
    if (result)
        return result == NOT_OURS ? -EOPNOTSUPP : result;
    calls_begin(request);
    int error = reach(request->core, &known, &seen, &fd);
    if (!error)
        error = may_access(fd < 0 ? known.fd->number : fd, (int)mask);
    if (fd >= 0)
        close(fd);
    calls_end(request);
    close_known(&known);
    return -error;
}

/* STATFS. */

int do_statfs(Request *request) {
    struct statvfs found;
    calls_begin(request);
    int error = fstatvfs(request->core->tables->root->dir_fd->number, &found) < 0 ? errno : 0;
    calls_end(request);
    if (error)
        return -error;
    const uint64_t longs[] = {found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree};
    const uint32_t words[10] = {(uint32_t)found.f_bsize, (uint32_t)found.f_namemax, (uint32_t)found.f_frsize};
    memcpy(request->answer, longs, sizeof longs); /* struct fuse_kstatfs */
    memcpy(request->answer + sizeof longs, words, sizeof words);
    return sizeof longs + sizeof words;
}

/* Set-user-ID and set-group-ID bits: cleared, and kept, by the caller's rights instead of the daemon's. */

static int chmod_held(int fd, uint32_t mode) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return chmod(path, mode & 07777) < 0 ? errno : 0;
}

/* chmod as root. With another fsuid the kernel would check whether the daemon is in the file's group, for the
 * set-group-ID bit. */
static int chmod_as_root(const Request *request, int fd, uint32_t mode) {
    Seen seen;
    int error = look(fd, "", 0, &seen);
    if (error)
        return error;
    Actor actor = {.gid = seen.gid};
    error = act_begin(request->core, &actor);
    if (!error)
        error = chmod_held(fd, mode);
    act_end(request->core, &actor);
    return error;
}

/* Return the mode of a file whose content is about to be changed; 0: it has neither bit. */
uint32_t bits_before(int fd) {
    Seen seen;
    return !look(fd, "", 0, &seen) && seen.mode & BITS ? seen.mode : 0;
}

/* Restore the bits if the caller may keep them: the daemon's write has cleared them. The kernel lets no other process
 * change the mode meanwhile. Returns 0 or an errno. */
int keep_bits(const Request *request, int fd, uint32_t mode) {
    return mode && is_capable(request, FSETID) ? chmod_as_root(request, fd, mode) : 0;
}

/* Clear the bits, as any chown does; before the write, or the kernel would still use them. Returns 0 or an errno: EPERM
 * for a caller that is not the owner, unless it may be writing. Source: setattr_should_drop_suidgid in fs/attr.c; the
 * kernel has cleared capabilities itself */
static int take_bits(const Request *request, int fd, const Seen *seen, bool has_writer) {
    bool is_group_kept = !(seen->mode & S_IXGRP) && keeps_group(request, seen);
    if (S_ISDIR(seen->mode) || !(seen->mode & (is_group_kept ? S_ISUID : BITS)))
        return 0;
    int error;
    if (!has_writer) {
        const Need need = by_owner_alone(seen);
        Acting acting = acting_by(request, &need, 1);
        if (is_group_kept)
            acting.actor.gid = seen->gid;
        while (acts(&acting, &error))
            error = fchownat(fd, "", (uid_t)-1, (gid_t)-1, AT_EMPTY_PATH) < 0 ? errno : 0;
        return error;
    }
    Actor actor = {.gid = is_group_kept ? seen->gid : request->core->nobody_gid};
    error = act_begin(request->core, &actor);
    if (!error)
        error = fchownat(fd, "", (uid_t)-1, (gid_t)-1, AT_EMPTY_PATH) < 0 ? errno : 0;
    act_end(request->core, &actor);
    return is_refusal(error) ? 0 : error; /* in a user's own mount, another user's file: the write itself clears them */
}

/* SETATTR. */

struct wanted { /* struct fuse_setattr_in */
    uint32_t valid, padding;
    uint64_t fh, size, lock_owner;
    int64_t atime, mtime, ctime;
    uint32_t atime_ns, mtime_ns, ctime_ns, mode, unused, uid, gid, unused_too;
};

static int change_owner(const Request *request, int fd, const struct wanted *wanted, const Seen *seen) {
    uid_t uid = wanted->valid & UID ? wanted->uid : (uid_t)-1;
    gid_t gid = wanted->valid & GID ? wanted->gid : (gid_t)-1;
    const Need needs[] = {
        {CHOWN, seen->uid, seen->gid},
        {CHOWN, wanted->valid & UID ? uid : seen->uid, wanted->valid & GID ? gid : seen->gid},
        by_owner_alone(seen), /* clears set-user-ID bits */
    };
    Acting acting = acting_by(request, needs, 3);
    int error;
    while (acts(&acting, &error))
        error = fchownat(fd, "", uid, gid, AT_EMPTY_PATH) < 0 ? errno : 0;
    return error;
}

/* A mode that is sent with other changes is the kernel's own: the mode without bits that the other change clears. */
static int change_mode(const Request *request, int fd, const struct wanted *wanted, const Seen *seen, bool has_writer) {
    if ((wanted->valid & CHANGES) != MODE)
        return chmod_as_root(request, fd, wanted->mode);
    const Need need = by_owner_alone(seen);
    Acting acting = acting_by(request, &need, 1);
    if (wanted->mode & S_ISGID && keeps_group(request, seen))
        acting.actor.gid = seen->gid;
    int error;
    while (acts(&acting, &error))
        error = chmod_held(fd, wanted->mode);
    /* In plain mode the kernel sends a mode without the bits before a write, as libfuse does not report that writes
     * clear them. */
    uint32_t before = seen->mode & 07777, mode = wanted->mode & 07777;
    if (is_refusal(error) && has_writer && (mode | BITS) == (before | BITS) && !(mode & ~before))
        return chmod_as_root(request, fd, mode);
    return error;
}

static struct timespec time_of(uint32_t is_wanted, uint32_t is_now, int64_t seconds, uint32_t ns) {
    struct timespec time = {.tv_nsec = is_wanted ? UTIME_NOW : UTIME_OMIT}; /* now for both: allowed if it may write */
    if (is_wanted && !is_now)
        time = (struct timespec){.tv_sec = (time_t)seconds, .tv_nsec = ns};
    return time;
}

static int change_times(const Request *request, int fd, const struct wanted *wanted, const Seen *seen) {
    struct timespec times[] = {time_of(wanted->valid & ATIME, wanted->valid & ATIME_NOW, wanted->atime, wanted->atime_ns),
                               time_of(wanted->valid & MTIME, wanted->valid & MTIME_NOW, wanted->mtime, wanted->mtime_ns)};
    const Need needs[] = {by_owner_alone(seen), by_mode(seen)};
    Acting acting = acting_by(request, needs, times[0].tv_nsec == UTIME_NOW && times[1].tv_nsec == UTIME_NOW ? 2 : 1);
    int error;
    while (acts(&acting, &error))
        error = utimensat(fd, "", times, AT_EMPTY_PATH) < 0 ? errno : 0;
    return error;
}

/* Set the size. file: a handle's fd, or an fd that was opened for this. The latter is truncated by its path, as
 * truncate(2) sets other times than ftruncate(2). */
static int change_size(const Request *request, int file, bool is_handle, uint64_t size) {
    char path[32];
    uint32_t mode = bits_before(file);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    Actor actor = {.gid = request->core->nobody_gid};
    int error = act_begin(request->core, &actor);
    if (!error)
        error = (is_handle ? ftruncate(file, (off_t)size) : truncate(path, (off_t)size)) < 0 ? errno : 0;
    act_end(request->core, &actor);
    int error_of_bits = keep_bits(request, file, mode);
    return error ? error : error_of_bits;
}

/* Change the inode of an fd, in an order in which no change undoes another. Without any of CHANGES the kernel requests
 * to clear the bits before a write, or it is a chown without ids. */
static int change(const Request *request, int fd, int file, const struct wanted *wanted, const Seen *seen,
                  bool has_writer) {
    uint32_t what = wanted->valid & CHANGES;
    bool is_handle = file >= 0;
    int error = 0;
    if (what & SIZE && !is_handle) /* before all changes, as it may have to wait, and be repeated */
        error = open_held(request, fd, seen, O_WRONLY, &file);
    if (!error && !what)
        error = take_bits(request, fd, seen, has_writer);
    if (!error && what & (UID | GID))
        error = change_owner(request, fd, wanted, seen);
    if (!error && what & MODE)
        error = change_mode(request, fd, wanted, seen, has_writer);
    if (!error && what & SIZE)
        error = change_size(request, file, is_handle, wanted->size);
    else if (!error && what & (ATIME | MTIME))
        error = change_times(request, fd, wanted, seen);
    if (!is_handle && file >= 0)
        close(file);
    return error;
}

int do_setattr(Request *request) {
    Core *core = request->core;
    struct wanted wanted;
    Known known;
    Seen seen;
    int fd;
    memcpy(&wanted, request->own, sizeof wanted);
    const Handle *handle = NULL;
    if (wanted.valid & SIZE && wanted.valid & BY_HANDLE) {
        handle = handle_of_number(core->tables, wanted.fh);
        if (handle == NULL || handle->node != node_of(core->tables, request->nodeid))
            return -EBADF;
    }
    int result = open_known(request, request->nodeid, &known);
    if (result)
        return result == NOT_OURS ? -EOPNOTSUPP : result;
    Node *node = known.node;
    Fd *file = handle == NULL ? NULL : fd_take(handle->fd);
    bool has_writer = false;
    for (handle = node->handles; handle != NULL; handle = handle->next)
        has_writer |= handle->writes;
    change_begins(node);
    calls_begin(request);
    int error = reach(request->core, &known, &seen, &fd), held = fd < 0 && !error ? known.fd->number : fd;
    if (!error)
        error = change(request, held, file == NULL ? -1 : file->number, &wanted, &seen, has_writer);
    calls_end(request);
    node->n_changing--;
    note_change(request, node);
    forget_cached(request, node, NULL);
    if (error)
        mistake(request, node, error);
    calls_begin(request);
    if (!error)
        error = look(held, "", core->statx_flags, &seen);
    if (fd >= 0)
        close(fd);
    calls_end(request);
    bool is_steady = !is_unsteady(node);
    if (!error)
        node->is_told |= is_steady && !node->is_directory;
    request->is_fickle = !is_outside(core, node);
    result = error ? -error : put_attr(request, node, &seen, is_steady);
    fd_put(file);
    close_known(&known);
    return result;
}
