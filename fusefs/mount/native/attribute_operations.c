/* Attributes of nodes, and changes to them: GETATTR, STATX, ACCESS, SETATTR, STATFS. */
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

/* Stat a node; if it has ended, get its last attributes. Called without the tables lock. Returns 0 or an errno. */
static int stat_node(Request *request, Route *route, Stat *st) {
    Core *core = request->core;
    int fd = -1, error = 0;
    if (route->fd != NULL || stat_by_name(core, route, st))
        error = reach_inode(request->core, route, st, &fd);
    if (fd >= 0)
        close(fd);
    if (!error)
        return 0;
    tables_lock(core->mutex);
    const Stat *last = route->node->final_stat;
    if (last != NULL)
        *st = *last;
    tables_unlock(core->mutex);
    return last == NULL ? error : 0;
}

/* Put struct fuse_statx_out. Returns its size. */
static int put_statx(Request *request, Node *node, const Stat *st) {
    struct {
        uint64_t seconds;
        uint32_t ns, flags;
        uint64_t spare[2];
        struct statx found;
    } out = {0};
    char attr[ATTR_BYTES], *answer = request->reply_body;
    uint64_t number;
    request->reply_body = attr; /* for the attr timeout and the inode number */
    put_attr(request, node, st, !is_unsteady(node));
    request->reply_body = answer;
    memcpy(&out, attr, sizeof out.seconds + sizeof out.ns);
    memcpy(&number, attr + 16, sizeof number);
    out.found = (struct statx){
        .stx_mask = STATX_BASIC_STATS | (st->btime_ns ? STATX_BTIME : 0),
        .stx_blksize = st->blksize,
        .stx_nlink = st->nlink,
        .stx_uid = st->uid,
        .stx_gid = st->gid,
        .stx_mode = (uint16_t)st->mode,
        .stx_ino = number,
        .stx_size = st->size,
        .stx_blocks = st->blocks,
        .stx_atime = {.tv_sec = st->atime_s, .tv_nsec = st->atime_ns},
        .stx_mtime = {.tv_sec = st->mtime_s, .tv_nsec = st->mtime_ns},
        .stx_ctime = {.tv_sec = st->ctime_s, .tv_nsec = st->ctime_ns},
        .stx_btime = {.tv_sec = st->btime_ns / 1000000000, .tv_nsec = (uint32_t)(st->btime_ns % 1000000000)},
        .stx_rdev_major = major(st->rdev),
        .stx_rdev_minor = minor(st->rdev),
    };
    memcpy(answer, &out, sizeof out);
    return sizeof out;
}

static int reply_attributes(Request *request, bool is_statx) {
    Route route;
    Stat st;
    int result = open_route(request, request->nodeid, &route);
    if (result)
        return result;
    calls_begin(request);
    StatTimer timer = start_stat_timer(request->core);
    int error = stat_node(request, &route, &st);
    stop_stat_timer(request->core, &timer, 1);
    calls_end(request);
    report_stat_time(request, &timer, 1);
    if (error)
        result = -error;
    else {
        bool is_steady = !is_unsteady(route.node);
        route.node->was_sent |= is_steady && !route.node->is_directory;
        request->is_uncacheable = !is_outside(request->core, route.node);
        result = is_statx ? put_statx(request, route.node, &st) : put_attr(request, route.node, &st, is_steady);
    }
    close_route(&route);
    return result;
}

int do_getattr(Request *request) { return reply_attributes(request, false); }
int do_statx(Request *request) { return reply_attributes(request, true); }

/* ACCESS, in a user's own mount: whether the daemon, which runs as that user, has access. */
int do_access(Request *request) {
    uint32_t mask;
    Route route;
    Stat st;
    int fd;
    memcpy(&mask, request->op_in, sizeof mask);
    int result = open_route(request, request->nodeid, &route);
    if (result)
        return result == NOT_OURS ? -EOPNOTSUPP : result;
    calls_begin(request);
    int error = reach_inode(request->core, &route, &st, &fd);
    if (!error)
        error = may_access(fd < 0 ? route.fd->number : fd, (int)mask);
    if (fd >= 0)
        close(fd);
    calls_end(request);
    close_route(&route);
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
    memcpy(request->reply_body, longs, sizeof longs); /* struct fuse_kstatfs */
    memcpy(request->reply_body + sizeof longs, words, sizeof words);
    return sizeof longs + sizeof words;
}

/* Set-user-ID and set-group-ID bits: the caller's rights, not the daemon's, decide whether they are cleared. */

static int chmod_held(int fd, uint32_t mode) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return chmod(path, mode & 07777) < 0 ? errno : 0;
}

/* chmod as root. With another fsuid, the kernel would allow the set-group-ID bit only if the daemon were in the file's
 * group. */
static int chmod_as_root(const Request *request, int fd, uint32_t mode) {
    Stat st;
    int error = stat_at(fd, "", 0, &st);
    if (error)
        return error;
    Identity identity = {.gid = st.gid};
    error = assume_identity(request->core, &identity);
    if (!error)
        error = chmod_held(fd, mode);
    restore_identity(request->core, &identity);
    return error;
}

/* Return the mode of a file whose content is about to be changed; 0: neither of these bits is set. */
uint32_t setid_mode(int fd) {
    Stat st;
    return !stat_at(fd, "", 0, &st) && st.mode & BITS ? st.mode : 0;
}

/* Restore the bits, which the daemon's write has cleared, if the caller may keep them. In between, the kernel lets no
 * other process change the mode. Returns 0 or an errno. */
int restore_setid_bits(const Request *request, int fd, uint32_t mode) {
    return mode && is_capable(request, FSETID) ? chmod_as_root(request, fd, mode) : 0;
}

/* Clear the bits by a chown, before the write; otherwise, the kernel would still use them. Returns 0 or an errno: EPERM
 * for a caller that is not the owner, unless it may be writing. Source: setattr_should_drop_suidgid in fs/attr.c; the
 * kernel has cleared capabilities itself */
static int clear_setid_bits(const Request *request, int fd, const Stat *st, bool has_writer) {
    bool is_group_kept = !(st->mode & S_IXGRP) && keeps_group(request, st);
    if (S_ISDIR(st->mode) || !(st->mode & (is_group_kept ? S_ISUID : BITS)))
        return 0;
    int error;
    if (!has_writer) {
        const NeededCapability need = only_owner(st);
        CallerAttempts attempts = attempt_with_needs(request, &need, 1);
        if (is_group_kept)
            attempts.identity.gid = st->gid;
        while (next_attempt(&attempts, &error))
            error = fchownat(fd, "", (uid_t)-1, (gid_t)-1, AT_EMPTY_PATH) < 0 ? errno : 0;
        return error;
    }
    Identity identity = {.gid = is_group_kept ? st->gid : request->core->nobody_gid};
    error = assume_identity(request->core, &identity);
    if (!error)
        error = fchownat(fd, "", (uid_t)-1, (gid_t)-1, AT_EMPTY_PATH) < 0 ? errno : 0;
    restore_identity(request->core, &identity);
    /* If the file is another user's, and the mount is a user's own, the write itself clears the bits. */
    return is_permission_error(error) ? 0 : error;
}

/* SETATTR. */

struct setattr_in { /* struct fuse_setattr_in */
    uint32_t valid, padding;
    uint64_t fh, size, lock_owner;
    int64_t atime, mtime, ctime;
    uint32_t atime_ns, mtime_ns, ctime_ns, mode, unused, uid, gid, unused_too;
};

static int change_owner(const Request *request, int fd, const struct setattr_in *in, const Stat *st) {
    uid_t uid = in->valid & UID ? in->uid : (uid_t)-1;
    gid_t gid = in->valid & GID ? in->gid : (gid_t)-1;
    const NeededCapability needs[] = {
        {CHOWN, st->uid, st->gid},
        {CHOWN, in->valid & UID ? uid : st->uid, in->valid & GID ? gid : st->gid},
        only_owner(st), /* clears set-user-ID bits */
    };
    CallerAttempts attempts = attempt_with_needs(request, needs, 3);
    int error;
    while (next_attempt(&attempts, &error))
        error = fchownat(fd, "", uid, gid, AT_EMPTY_PATH) < 0 ? errno : 0;
    return error;
}

/* A mode that is sent with other changes is the kernel's own: the mode without bits that the other change clears. */
static int change_mode(const Request *request, int fd, const struct setattr_in *in, const Stat *st, bool has_writer) {
    if ((in->valid & CHANGES) != MODE)
        return chmod_as_root(request, fd, in->mode);
    const NeededCapability need = only_owner(st);
    CallerAttempts attempts = attempt_with_needs(request, &need, 1);
    if (in->mode & S_ISGID && keeps_group(request, st))
        attempts.identity.gid = st->gid;
    int error;
    while (next_attempt(&attempts, &error))
        error = chmod_held(fd, in->mode);
    /* In plain mode, the kernel sends a mode without the bits before a write, as libfuse does not report that writes
     * clear them. */
    uint32_t before = st->mode & 07777, mode = in->mode & 07777;
    if (is_permission_error(error) && has_writer && (mode | BITS) == (before | BITS) && !(mode & ~before))
        return chmod_as_root(request, fd, mode);
    return error;
}

static struct timespec timespec_of(uint32_t is_set, uint32_t is_now, int64_t seconds, uint32_t ns) {
    struct timespec time = {.tv_nsec = is_set ? UTIME_NOW : UTIME_OMIT}; /* now for both: any writer may set it */
    if (is_set && !is_now)
        time = (struct timespec){.tv_sec = (time_t)seconds, .tv_nsec = ns};
    return time;
}

static int change_times(const Request *request, int fd, const struct setattr_in *in, const Stat *st) {
    struct timespec times[] = {timespec_of(in->valid & ATIME, in->valid & ATIME_NOW, in->atime, in->atime_ns),
                               timespec_of(in->valid & MTIME, in->valid & MTIME_NOW, in->mtime, in->mtime_ns)};
    const NeededCapability needs[] = {only_owner(st), override_of_mode(st)};
    CallerAttempts attempts = attempt_with_needs(
        request, needs, times[0].tv_nsec == UTIME_NOW && times[1].tv_nsec == UTIME_NOW ? 2 : 1);
    int error;
    while (next_attempt(&attempts, &error))
        error = utimensat(fd, "", times, AT_EMPTY_PATH) < 0 ? errno : 0;
    return error;
}

/* Set the size. file: a handle's fd, or an fd that was opened for this. The latter is truncated by its path, as
 * truncate(2) sets different times from ftruncate(2). */
static int change_size(const Request *request, int file, bool is_handle, uint64_t size) {
    char path[32];
    uint32_t mode = setid_mode(file);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    Identity identity = {.gid = request->core->nobody_gid};
    int error = assume_identity(request->core, &identity);
    if (!error)
        error = (is_handle ? ftruncate(file, (off_t)size) : truncate(path, (off_t)size)) < 0 ? errno : 0;
    restore_identity(request->core, &identity);
    int error_of_bits = restore_setid_bits(request, file, mode);
    return error ? error : error_of_bits;
}

/* Change the inode of an fd, in an order in which no change undoes another. If none of CHANGES is requested, the kernel
 * wants the bits cleared before a write, or this is a chown without ids. */
static int change_inode(const Request *request, int fd, int file, const struct setattr_in *in, const Stat *st,
                        bool has_writer) {
    uint32_t what = in->valid & CHANGES;
    bool is_handle = file >= 0;
    int error = 0;
    if (what & SIZE && !is_handle) /* before all changes, since the open may have to wait and be repeated */
        error = open_as_caller(request, fd, st, O_WRONLY, &file);
    if (!error && !what)
        error = clear_setid_bits(request, fd, st, has_writer);
    if (!error && what & (UID | GID))
        error = change_owner(request, fd, in, st);
    if (!error && what & MODE)
        error = change_mode(request, fd, in, st, has_writer);
    if (!error && what & SIZE)
        error = change_size(request, file, is_handle, in->size);
    else if (!error && what & (ATIME | MTIME))
        error = change_times(request, fd, in, st);
    if (!is_handle && file >= 0)
        close(file);
    return error;
}

int do_setattr(Request *request) {
    Core *core = request->core;
    struct setattr_in in;
    Route route;
    Stat st;
    int fd;
    memcpy(&in, request->op_in, sizeof in);
    const Handle *handle = NULL;
    if (in.valid & SIZE && in.valid & BY_HANDLE) {
        handle = handle_of_number(core->tables, in.fh);
        if (handle == NULL || handle->node != node_of(core->tables, request->nodeid))
            return -EBADF;
    }
    int result = open_route(request, request->nodeid, &route);
    if (result)
        return result == NOT_OURS ? -EOPNOTSUPP : result;
    Node *node = route.node;
    Fd *file = handle == NULL ? NULL : fd_take(handle->fd);
    bool has_writer = false;
    for (handle = node->handles; handle != NULL; handle = handle->next)
        has_writer |= handle->writes;
    change_begins(node);
    calls_begin(request);
    int error = reach_inode(request->core, &route, &st, &fd), held = fd < 0 && !error ? route.fd->number : fd;
    if (!error)
        error = change_inode(request, held, file == NULL ? -1 : file->number, &in, &st, has_writer);
    calls_end(request);
    node->n_changing--;
    note_change(request, node);
    note_cached_change(request, node, NULL);
    if (error)
        note_refusal(request, node, error);
    calls_begin(request);
    if (!error)
        error = stat_at(held, "", core->statx_flags, &st);
    if (fd >= 0)
        close(fd);
    calls_end(request);
    bool is_steady = !is_unsteady(node);
    if (!error)
        node->was_sent |= is_steady && !node->is_directory;
    request->is_uncacheable = !is_outside(core, node);
    result = error ? -error : put_attr(request, node, &st, is_steady);
    fd_put(file);
    close_route(&route);
    return result;
}
