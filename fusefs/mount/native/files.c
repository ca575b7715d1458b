/* Handles: OPEN and RELEASE of files. */
#include "core.h"

#include <stdio.h>

enum { FOPEN_DIRECT_IO = 1 << 0, FOPEN_KEEP_CACHE = 1 << 1, FOPEN_PASSTHROUGH = 1 << 7 };
static const uint32_t FOR_EXECUTION = 0x20; /* __FMODE_EXEC */
static const uint32_t KERNELS_OWN = O_CREAT | O_EXCL | O_NOFOLLOW | O_DIRECT | O_NOCTTY;
static const uint32_t NOBODY = 65534;

/* Room for a handle of the caller's; directories' fds may be closed for it. Returns 0, or -1 with an exception. */
int make_room(Request *request) {
    PyObject *uid = PyLong_FromUnsignedLong(request->uid);
    PyObject *room = uid == NULL ? NULL : PyObject_CallFunctionObjArgs(request->core->make_room, uid, NULL);
    Py_XDECREF(uid);
    Py_XDECREF(room);
    return room == NULL ? -1 : 0;
}

/* Have a handle of a node, by an Fd that is Opening's from now on, and put struct fuse_open_out.
 *
 * size  of the file, or -1: unknown
 * keeps whether the kernel may keep its pages, if it is not passed through; else it is found out
 * Returns the id by which it is passed through, or 0, as a Python number; NULL: an exception. */
PyObject *put_handle(Request *request, PyObject *node, PyObject *handle, uint32_t flags, int64_t size,
                     const Seen *seen, char *to, bool keeps) {
    Core *core = request->core;
    uint32_t writer = seen->uid ? seen->uid : seen->mode & (S_IWGRP | S_IWOTH) ? NOBODY : 0;
    PyObject *length = size < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(size), *backing = NULL, *whole = NULL;
    PyObject *uid = PyLong_FromUnsignedLong(request->uid), *how = PyLong_FromUnsignedLong(flags);
    PyObject *as = PyLong_FromUnsignedLong(writer);
    if (length != NULL && uid != NULL && how != NULL && as != NULL)
        backing = PyObject_CallFunctionObjArgs(core->opened, node, handle, uid, how, length, as, NULL);
    int32_t id = backing == NULL ? 0 : (int32_t)PyLong_AsLong(backing);
    uint32_t told = id ? FOPEN_PASSTHROUGH : keeps ? FOPEN_KEEP_CACHE : 0;
    if (backing != NULL && !id && !keeps) {
        PyObject *are_right = PyObject_CallFunctionObjArgs(core->keeps_pages, node, handle, NULL);
        if (are_right == NULL)
            Py_CLEAR(backing);
        else if (are_right == Py_True)
            told |= FOPEN_KEEP_CACHE;
        Py_XDECREF(are_right);
    }
    if (backing != NULL && !id) {
        whole = PyObject_CallFunctionObjArgs(core->comes_whole, handle, NULL);
        if (whole == NULL)
            Py_CLEAR(backing);
        else if (whole == Py_True)
            told |= FOPEN_DIRECT_IO;
    }
    uint64_t fh = (uint64_t)PyLong_AsLong(handle);
    memcpy(to, &fh, sizeof fh);
    memcpy(to + 8, &told, sizeof told);
    memcpy(to + 12, &id, sizeof id);
    Py_XDECREF(whole);
    Py_XDECREF(length);
    Py_XDECREF(uid);
    Py_XDECREF(how);
    Py_XDECREF(as);
    return backing;
}

int do_open(Request *request) {
    Core *core = request->core;
    uint32_t flags;
    Known known;
    Seen seen;
    char path[32];
    int held, fd = -1, result = NOT_OURS;
    memcpy(&flags, request->own, sizeof flags);
    if (flags & (O_TRUNC | O_DIRECT | O_PATH | FOR_EXECUTION))
        return NOT_OURS;
    if (make_room(request) < 0)
        return RAISED;
    if (open_known(request, request->nodeid, &known) < 0)
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    PyObject *handle = NULL, *backing = NULL;
    if (known.fd >= 0) /* open already, or a directory: Python knows what to hold */
        goto end;
    if (calls_begin(request) < 0) {
        result = RAISED;
        goto end;
    }
    int error = reach(core, &known, &seen, &held);
    if (!error && S_ISREG(seen.mode) && (!core->acts_as_others || seen.uid == request->uid)) {
        Actor actor = {.uid = request->uid, .gid = request->gid};
        snprintf(path, sizeof path, "/proc/self/fd/%d", held);
        if (act_begin(core, &actor) == 0)
            fd = open(path, (int)(flags & ~KERNELS_OWN) | O_CLOEXEC | O_NONBLOCK);
        act_end(core, &actor);
    }
    if (held >= 0)
        close(held);
    if (calls_end(request) < 0) {
        result = RAISED;
        goto end;
    }
    if (fd < 0)
        goto end;
    handle = PyObject_CallFunction(core->Fd, "i", fd);
    if (handle == NULL) {
        close(fd);
        result = RAISED;
        goto end;
    }
    backing = put_handle(request, known.node, handle, flags, (int64_t)seen.size, &seen, request->answer, !core->is_shared);
    result = backing == NULL ? RAISED : OPEN_BYTES;
end:
    Py_XDECREF(handle);
    Py_XDECREF(backing);
    close_known(&known);
    return result;
}

int do_release(Request *request) {
    uint64_t fh;
    memcpy(&fh, request->own, sizeof fh);
    PyObject *handle = PyLong_FromUnsignedLongLong(fh);
    PyObject *nothing = handle == NULL ? NULL : PyObject_CallFunctionObjArgs(request->core->released, handle, NULL);
    Py_XDECREF(handle);
    Py_XDECREF(nothing);
    if (nothing == NULL && PyErr_ExceptionMatches(request->core->WouldWait)) {
        PyErr_Clear();
        return NOT_OURS;
    }
    return nothing == NULL ? RAISED : 0;
}
