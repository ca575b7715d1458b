/* Calls for many names of one directory, without Python's lock while they are made.
 *
 * Python remains the reference: linux/batched_calls.py and linux/kernel.py do the same a call at a time, where this is
 * not built, or where each call is to be seen. What is not plain is left to them: `look` gives it back as unsure.
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

/* Names of one call, as the kernel takes them: those of a list of str, which must stay as it is meanwhile. */
struct names {
    Py_ssize_t n;
    const char **texts;
    PyObject **owned; /* of names that are no UTF-8 */
    int *errnos;      /* for what comes of each; 0 to begin with */
};

/* Raises: TypeError, ValueError, MemoryError; free_names is due all the same */
int take_names(struct names *names, PyObject *list);
void free_names(struct names *names);
/* (name, errno) of each whose errno is not 0. */
PyObject *refused(const struct names *names, PyObject *list);

/* Take a reference that may be NULL into a list. Raises, then as well */
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
