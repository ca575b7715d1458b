/* Reads some entries of a directory with getdents64. */
#include "bulk.h"

#include <dirent.h>

/* The beginning and end of the selected names. */
struct ends {
    const char *first, *last;
    Py_ssize_t n_first, n_last;
};

/* Directories and entries of unknown type are always selected: Python decides, since they may have to be entered. */
static bool is_selected(const struct entry *entry, size_t length, const struct ends *ends) {
    size_t n_first = (size_t)ends->n_first, n_last = (size_t)ends->n_last;
    if (entry->kind == DT_DIR || entry->kind == DT_UNKNOWN)
        return true;
    return length >= n_first && length >= n_last && !memcmp(entry->name, ends->first, n_first) &&
           !memcmp(entry->name + length - n_last, ends->last, n_last);
}

/* Return the selected names joined with slashes, their inode numbers, their types, and the number of all entries. */
static PyObject *selected_entries(const char *entries, long size, const struct ends *ends) {
    static _Thread_local char text[ROOM], kinds[ROOM / sizeof(struct entry)];
    size_t n_text = 0, n = 0;
    Py_ssize_t n_all = 0;
    PyObject *inos = PyList_New(0);
    for (long at = 0; inos != NULL && at < size;) {
        const struct entry *entry = (const struct entry *)(entries + at);
        at += entry->length;
        if (is_dots(entry->name))
            continue;
        n_all++;
        size_t length = strlen(entry->name);
        if (!is_selected(entry, length, ends))
            continue;
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
    PyObject *result = NULL;
    if (joined != NULL)
        result = Py_BuildValue("OOy#n", joined, inos, kinds, (Py_ssize_t)n, n_all);
    Py_XDECREF(joined);
    Py_DECREF(inos);
    return result;
}

PyObject *bulk_read(PyObject *module, PyObject *args) {
    (void)module;
    static _Thread_local char entries[ROOM] __attribute__((aligned(8)));
    int fd;
    struct ends ends;
    long size;
    if (!PyArg_ParseTuple(args, "iy#y#", &fd, &ends.first, &ends.n_first, &ends.last, &ends.n_last))
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
    return selected_entries(entries, size, &ends);
}
