/* SETATTR: a mode, an owner or a group, or times. */
#include "core.h"

#include <sys/syscall.h>

static const int FCHMODAT2 = 452; /* Linux 6.6 */

enum {
    MODE = 1 << 0, UID = 1 << 1, GID = 1 << 2, ATIME = 1 << 4, MTIME = 1 << 5, BY_HANDLE = 1 << 6, ATIME_NOW = 1 << 7,
    MTIME_NOW = 1 << 8, KILL_BITS = 1 << 11, /* set-user-ID and the like: as chown(2) does */
};

struct wanted { /* struct fuse_setattr_in */
    uint32_t valid, padding;
    uint64_t fh, size, lock_owner, atime, mtime, ctime;
    uint32_t atime_ns, mtime_ns, ctime_ns, mode, unused, uid, gid, unused_too;
};

static struct timespec time_of(uint32_t is_wanted, uint32_t is_now, uint64_t seconds, uint32_t ns) {
    struct timespec time = {.tv_nsec = is_wanted ? UTIME_NOW : UTIME_OMIT}; /* both to now: who may write may, too */
    if (is_wanted && !is_now)
        time = (struct timespec){.tv_sec = (time_t)seconds, .tv_nsec = ns};
    return time;
}

/* Change what an fd holds, O_PATH or not, as the caller. Returns 0 or an errno. */
static int change(const Request *request, int fd, const struct wanted *wanted, const Seen *seen) {
    uid_t uid = wanted->valid & UID ? wanted->uid : (uid_t)-1;
    gid_t gid = wanted->valid & GID ? wanted->gid : (gid_t)-1;
    bool is_own = seen->uid == request->uid && (!(wanted->valid & UID) || uid == request->uid);
    Acting acting = acting_as(request, is_own);
    struct timespec times[] = {time_of(wanted->valid & ATIME, wanted->valid & ATIME_NOW, wanted->atime, wanted->atime_ns),
                               time_of(wanted->valid & MTIME, wanted->valid & MTIME_NOW, wanted->mtime, wanted->mtime_ns)};
    int error;
    while (acts(&acting, &error)) {
        long done = wanted->valid & MODE          ? syscall(FCHMODAT2, fd, "", wanted->mode & 07777, AT_EMPTY_PATH)
                    : wanted->valid & (UID | GID) ? fchownat(fd, "", uid, gid, AT_EMPTY_PATH)
                                                  : utimensat(fd, "", times, AT_EMPTY_PATH);
        error = done < 0 ? errno : 0;
    }
    return error;
}

int do_setattr(Request *request) {
    Core *core = request->core;
    struct wanted wanted;
    Known known;
    Seen seen;
    int fd, result = NOT_OURS;
    bool is_changed = false;
    memcpy(&wanted, request->own, sizeof wanted);
    uint32_t what = wanted.valid & ~(uint32_t)BY_HANDLE;
    bool is_mode = what == MODE && !(wanted.mode & S_ISGID);
    bool is_owner = what & (UID | GID) && !(what & ~(uint32_t)(UID | GID | KILL_BITS));
    bool is_times = what & (ATIME | MTIME) && !(what & ~(uint32_t)(ATIME | MTIME | ATIME_NOW | MTIME_NOW));
    if ((!is_mode && !is_owner && !is_times) || open_known(request, request->nodeid, &known) < 0)
        return NOT_OURS;
    if (is_outside(core, known.node)) {
        calls_begin(request);
        int error = reach(core, &known, &seen, &fd);
        /* Where a change takes such bits along, or may not, that is Python's. */
        bool is_plain = is_times || !(seen.mode & (S_ISUID | S_ISGID));
        if (!error && is_plain && !(is_mode && S_ISLNK(seen.mode))) {
            int held = fd < 0 ? known.fd->number : fd;
            is_changed = change(request, held, &wanted, &seen) == 0;
            if (is_changed)
                error = look(held, "", core->statx_flags, &seen);
        }
        if (fd >= 0)
            close(fd);
        calls_end(request);
        if (is_changed) {
            bool is_steady = !is_unsteady(known.node);
            note_change(request, known.node);
            known.node->is_told |= is_steady && !known.node->is_directory;
            forget_cached(request, known.node, NULL);
            result = error ? -error : put_attr(request, known.node, &seen, is_steady);
        }
    }
    close_known(&known);
    return result;
}
