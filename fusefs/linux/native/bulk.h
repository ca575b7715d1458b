/* Calls for many names in one directory, made without Python's lock.
 *
 * Python is the reference: linux/batched_calls.py and linux/kernel.py do the same, name by name, if this is not built
 * or if a hook must see each call. They also handle the difficult cases, for which `match_name` returns UNSURE.
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

/* The names for one call as C strings, which belong to a list of str that must not change during the call. */
struct names {
    Py_ssize_t n;
    const char **texts;
    PyObject **owned; /* bytes objects for names that are not UTF-8 */
    int *errnos;      /* the result for each name; initially 0 */
};

/* Returns -1 after an exception: TypeError, ValueError or MemoryError. Call free_names even then. */
int take_names(struct names *names, PyObject *list);
void free_names(struct names *names);
/* Return a list of (name, errno) for each name whose errno is not 0. */
PyObject *refused(const struct names *names, PyObject *list);

/* Append an object to a list and drop the reference to it. Returns -1 on failure, or if the object is NULL. */
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
