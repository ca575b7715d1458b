/* SETATTR: a mode, or times. */
#include "core.h"

#include <stdio.h>

enum { ONE_MODE = 1 << 0, ATIME = 1 << 4, MTIME = 1 << 5, BY_HANDLE = 1 << 6, ATIME_NOW = 1 << 7, MTIME_NOW = 1 << 8 };

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

/* Change what an fd holds as the caller. Returns 0 or an errno. */
static int change(const Request *request, int fd, const struct wanted *wanted, bool is_own) {
    Acting acting = acting_as(request, is_own);
    struct timespec times[] = {time_of(wanted->valid & ATIME, wanted->valid & ATIME_NOW, wanted->atime, wanted->atime_ns),
                               time_of(wanted->valid & MTIME, wanted->valid & MTIME_NOW, wanted->mtime, wanted->mtime_ns)};
    char path[32];
    int error;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    while (acts(&acting, &error)) {
        int done = wanted->valid & ONE_MODE ? chmod(path, wanted->mode & 07777) : utimensat(AT_FDCWD, path, times, 0);
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
    bool is_mode = what == ONE_MODE && !(wanted.mode & S_ISGID);
    bool is_times = what & (ATIME | MTIME) && !(what & ~(uint32_t)(ATIME | MTIME | ATIME_NOW | MTIME_NOW));
    if ((!is_mode && !is_times) || open_known(request, request->nodeid, &known) < 0)
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    if (!is_outside(core, known.node)) {
        result = PyErr_Occurred() ? RAISED : NOT_OURS;
        goto end;
    }
    if (calls_begin(request) < 0) {
        result = RAISED;
        goto end;
    }
    int error = reach(core, &known, &seen, &fd);
    if (!error && !S_ISLNK(seen.mode) && !(seen.mode & S_ISGID)) {
        int held = fd < 0 ? known.fd : fd;
        is_changed = change(request, held, &wanted, seen.uid == request->uid) == 0;
        if (is_changed)
            error = look(held, "", core->statx_flags, &seen);
    }
    if (fd >= 0)
        close(fd);
    if (calls_end(request) < 0)
        result = RAISED;
    else if (is_changed) {
        int steady = is_steady(core, known.source);
        if (forget_changed(request, known.source, NULL, NULL) < 0 || steady < 0 ||
            (steady && PyObject_SetAttr(known.node, names.is_told, Py_True) < 0))
            result = RAISED;
        else
            result = error ? -error : put_attr(request, known.node, &seen, steady);
    }
end:
    close_known(&known);
    return result;
}
