/* Converts a list of names for C, and results for Python. */
#include "bulk.h"

int take_names(struct names *names, PyObject *list) {
    memset(names, 0, sizeof *names);
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "names must be a list");
        return -1;
    }
    names->n = PyList_Size(list);
    size_t room = names->n ? (size_t)names->n : 1;
    names->texts = PyMem_Calloc(room, sizeof *names->texts);
    names->owned = PyMem_Calloc(room, sizeof *names->owned);
    names->errnos = PyMem_Calloc(room, sizeof *names->errnos);
    if (names->texts == NULL || names->owned == NULL || names->errnos == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t at = 0; at < names->n; at++) {
        PyObject *name = PyList_GetItem(list, at);
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(name, &size);
        if (text == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
                return -1;
            PyErr_Clear();
            char *encoded;
            names->owned[at] = PyUnicode_EncodeFSDefault(name);
            if (names->owned[at] == NULL || PyBytes_AsStringAndSize(names->owned[at], &encoded, &size) < 0)
                return -1;
            text = encoded;
        }
        /* Refuse a path, since it would lead to another directory. */
        if (memchr(text, 0, size) != NULL || memchr(text, '/', size) != NULL) {
            PyErr_SetString(PyExc_ValueError, "not a name");
            return -1;
        }
        names->texts[at] = text;
    }
    return 0;
}

void free_names(struct names *names) {
    for (Py_ssize_t at = 0; names->owned != NULL && at < names->n; at++)
        Py_XDECREF(names->owned[at]);
    PyMem_Free(names->texts);
    PyMem_Free(names->owned);
    PyMem_Free(names->errnos);
}

int append(PyObject *list, PyObject *one) {
    int failed = one == NULL || PyList_Append(list, one) < 0;
    Py_XDECREF(one);
    return failed ? -1 : 0;
}

PyObject *refused(const struct names *names, PyObject *list) {
    PyObject *refusals = PyList_New(0);
    for (Py_ssize_t at = 0; refusals != NULL && at < names->n; at++) {
        if (!names->errnos[at])
            continue;
        if (append(refusals, Py_BuildValue("Oi", PyList_GetItem(list, at), names->errnos[at])) < 0)
            Py_CLEAR(refusals);
    }
    return refusals;
}
