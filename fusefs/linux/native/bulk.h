/* Calls for many names of one directory, made without Python's lock.
 *
 * Python is the reference: linux/batched_calls.py and linux/kernel.py do the same with one call at a time, if this is
 * not built, or if a hook must see each call. Python handles difficult cases: `match_name` returns UNSURE for those.
 */
#ifndef TRASHD_BULK_H
#define TRASHD_BULK_H

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dirent.h"

/* The names of one call as C strings; they belong to a list of str, which must not change meanwhile. */
struct names {
    Py_ssize_t n;
    const char **texts;
    PyObject **owned; /* bytes of names that are not UTF-8 */
    int *errnos;      /* the result for each; initially 0 */
};

/* Raises TypeError, ValueError or MemoryError; call free_names even then. */
int take_names(struct names *names, PyObject *list);
void free_names(struct names *names);
/* (name, errno) for each name whose errno is not 0. */
PyObject *refused(const struct names *names, PyObject *list);

/* Append an object to a list and drop its reference. NULL raises, too. */
int append(PyObject *list, PyObject *one);

PyObject *bulk_read(PyObject *module, PyObject *args);
PyObject *bulk_look(PyObject *module, PyObject *args);
PyObject *bulk_unlink(PyObject *module, PyObject *args);
PyObject *bulk_unlink_chosen(PyObject *module, PyObject *args);
PyObject *bulk_rename(PyObject *module, PyObject *args);
PyObject *bulk_window(PyObject *module, PyObject *args);
PyObject *bulk_read_files(PyObject *module, PyObject *args);
PyObject *bulk_lacking(PyObject *module, PyObject *args);

#endif
