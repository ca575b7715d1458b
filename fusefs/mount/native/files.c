/* Handles: OPEN and RELEASE of files. */
#include "core.h"

#include <stdio.h>

static const uint32_t FOR_EXECUTION = 0x20; /* __FMODE_EXEC */
static const uint32_t KERNELS_OWN = O_CREAT | O_EXCL | O_NOFOLLOW | O_DIRECT | O_NOCTTY;

/* An fd that was opened to append: not all that is written by its handle is. A file that may only grow keeps it. */
void write_anywhere(int fd) {
    int flags = fcntl(fd, F_GETFL);
    if (flags >= 0)
        fcntl(fd, F_SETFL, flags & ~O_APPEND);
}

/* Open what is held by an O_PATH fd as the caller. Returns an fd, or -1. */
static int open_held(const Request *request, int held, const Seen *seen, uint32_t flags) {
    char path[32];
    int fd = -1, error;
    if (!S_ISREG(seen->mode))
        return -1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", held);
    Acting acting = acting_as(request, seen->uid == request->uid);
    while (acts(&acting, &error)) {
        fd = open(path, (int)(flags & ~KERNELS_OWN) | O_CLOEXEC | O_NONBLOCK);
        error = fd < 0 ? errno : 0;
    }
    return fd;
}

int do_open(Request *request) {
    Core *core = request->core;
    uint32_t flags;
    Known known;
    Seen seen;
    Opening opening;
    int held, fd = -1, result = NOT_OURS;
    memcpy(&flags, request->own, sizeof flags);
    if (flags & (O_TRUNC | O_DIRECT | O_PATH | FOR_EXECUTION))
        return NOT_OURS;
    if (make_room(request) < 0)
        return RAISED;
    if (open_known(request, request->nodeid, &known) < 0)
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    if (known.fd >= 0) /* open already, or a directory: Python knows what to hold */
        goto end;
    result = RAISED;
    if (prepare_opening(request, known.node, flags, &opening) < 0 || calls_begin(request) < 0)
        goto end;
    if (reach(core, &known, &seen, &held) == 0) {
        fd = open_held(request, held, &seen, flags);
        close(held);
        if (fd >= 0) {
            open_backing(request, fd, &seen, &opening);
            if (flags & O_APPEND && opening.id)
                write_anywhere(fd);
        }
    }
    if (calls_end(request) < 0) {
        leave_opening(request, fd, &opening);
        goto end;
    }
    result = NOT_OURS;
    if (fd >= 0) {
        PyObject *handle =
            put_handle(request, known.node, fd, flags, &seen, false, &opening, request->answer);
        result = handle == NULL ? RAISED : OPEN_BYTES;
        Py_XDECREF(handle);
    }
end:
    close_known(&known);
    return result;
}

int do_release(Request *request) {
    uint64_t fh;
    memcpy(&fh, request->own, sizeof fh);
    PyObject *handle = PyLong_FromUnsignedLongLong(fh);
    int result = handle == NULL ? RAISED : let_go(request, handle);
    Py_XDECREF(handle);
    return result;
}
