/* getdents64: some entries of a directory. */
#include "bulk.h"

/* None at the end; else all names joined by slashes, their inode numbers, their kinds. */
static PyObject *told(const char *entries, long size) {
    static _Thread_local char text[ROOM], kinds[ROOM / sizeof(struct entry)];
    size_t n_text = 0, n = 0;
    PyObject *inos = PyList_New(0);
    for (long at = 0; inos != NULL && at < size;) {
        const struct entry *entry = (const struct entry *)(entries + at);
        at += entry->length;
        if (is_dots(entry->name))
            continue;
        size_t length = strlen(entry->name);
        if (n)
            text[n_text++] = '/';
        memcpy(text + n_text, entry->name, length);
        n_text += length;
        kinds[n++] = (char)entry->kind;
        if (append(inos, PyLong_FromUnsignedLongLong(entry->ino)) < 0)
            Py_CLEAR(inos);
    }
    if (inos == NULL)
        return NULL;
    PyObject *joined = PyUnicode_DecodeFSDefaultAndSize(text, (Py_ssize_t)n_text);
    PyObject *result = joined == NULL ? NULL : Py_BuildValue("OOy#", joined, inos, kinds, (Py_ssize_t)n);
    Py_XDECREF(joined);
    Py_DECREF(inos);
    return result;
}

PyObject *bulk_read(PyObject *module, PyObject *args) {
    (void)module;
    static _Thread_local char entries[ROOM] __attribute__((aligned(8)));
    int fd;
    long size;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return NULL;
    do {
        Py_BEGIN_ALLOW_THREADS
        size = syscall(SYS_getdents64, fd, entries, sizeof entries);
        Py_END_ALLOW_THREADS
    } while (size < 0 && errno == EINTR && PyErr_CheckSignals() == 0);
    if (size < 0)
        return PyErr_Occurred() ? NULL : PyErr_SetFromErrno(PyExc_OSError);
    if (size == 0)
        Py_RETURN_NONE;
    return told(entries, size);
}
