/* Files with the same name in many directories of one parent: read each, or check whether it exists. */
#include "bulk.h"

#include <limits.h>
#include <linux/openat2.h>
#include <stdio.h>

enum { WRITABLE_BY_OTHERS = S_IWGRP | S_IWOTH };

/* Open NAME/TAIL without crossing a link or a mount, like Kernel.open_beneath. */
static int open_beneath(int dir_fd, const char *name, const char *tail, uint64_t flags) {
    char path[2 * NAME_MAX + 2];
    struct open_how how = {
        .flags = flags | O_NOFOLLOW | O_CLOEXEC,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV,
    };
    if ((size_t)snprintf(path, sizeof path, "%s/%s", name, tail) >= sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    return (int)syscall(SYS_openat2, dir_fd, path, &how, sizeof how);
}

/* Return a file's content; NULL unless the file is as store.container.open_record requires. */
static char *read_file(int dir_fd, const char *name, const char *tail, uid_t uid, off_t most, size_t *n_read) {
    struct stat st;
    char *text = NULL;
    int fd = open_beneath(dir_fd, name, tail, O_RDWR | O_NONBLOCK);
    if (fd < 0)
        return NULL;
    bool is_plain = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == uid && st.st_size <= most &&
                    !(st.st_nlink > 1 && st.st_mode & WRITABLE_BY_OTHERS);
    if (is_plain && (text = malloc((size_t)st.st_size + 1)) != NULL) {
        ssize_t n = pread(fd, text, (size_t)st.st_size + 1, 0);
        /* If the file's size has changed in the meantime, Python reads the file again. */
        if (n == st.st_size) {
            *n_read = (size_t)n;
        } else {
            free(text);
            text = NULL;
        }
    }
    close(fd);
    return text;
}

static PyObject *to_list(char **texts, const size_t *sizes, Py_ssize_t n) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t at = 0; list != NULL && at < n; at++) {
        PyObject *text = texts[at] == NULL ? Py_NewRef(Py_None)
                                           : PyBytes_FromStringAndSize(texts[at], (Py_ssize_t)sizes[at]);
        if (append(list, text) < 0)
            Py_CLEAR(list);
    }
    return list;
}

PyObject *bulk_read_files(PyObject *module, PyObject *args) {
    (void)module;
    int fd;
    unsigned uid;
    Py_ssize_t most;
    const char *tail;
    PyObject *list, *result = NULL;
    struct names names;
    if (!PyArg_ParseTuple(args, "iOyIn", &fd, &list, &tail, &uid, &most))
        return NULL;
    if (take_names(&names, list) == 0) {
        size_t room = names.n ? (size_t)names.n : 1;
        char **texts = PyMem_Calloc(room, sizeof *texts);
        size_t *sizes = PyMem_Calloc(room, sizeof *sizes);
        if (texts == NULL || sizes == NULL) {
            PyErr_NoMemory();
        } else {
            Py_BEGIN_ALLOW_THREADS
            for (Py_ssize_t at = 0; at < names.n; at++)
                texts[at] = read_file(fd, names.texts[at], tail, uid, most, &sizes[at]);
            Py_END_ALLOW_THREADS
            result = to_list(texts, sizes, names.n);
        }
        for (Py_ssize_t at = 0; texts != NULL && at < names.n; at++)
            free(texts[at]);
        PyMem_Free(texts);
        PyMem_Free(sizes);
    }
    free_names(&names);
    return result;
}

PyObject *bulk_lacking(PyObject *module, PyObject *args) {
    (void)module;
    int dir_fd;
    const char *tail;
    PyObject *list, *result = NULL;
    struct names names;
    if (!PyArg_ParseTuple(args, "iOy", &dir_fd, &list, &tail))
        return NULL;
    if (take_names(&names, list) == 0) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t at = 0; at < names.n; at++) {
            int fd = open_beneath(dir_fd, names.texts[at], tail, O_PATH);
            if (fd < 0)
                names.errnos[at] = errno;
            else
                close(fd);
        }
        Py_END_ALLOW_THREADS
        result = refused(&names, list);
    }
    free_names(&names);
    return result;
}
