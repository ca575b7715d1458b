/* renameat2 for many names, to the same names in another directory. */
#include "bulk.h"

PyObject *bulk_rename(PyObject *module, PyObject *args) {
    (void)module;
    int old_fd, new_fd;
    unsigned flags;
    PyObject *list, *result = NULL;
    struct names names;
    if (!PyArg_ParseTuple(args, "iiOI", &old_fd, &new_fd, &list, &flags))
        return NULL;
    if (take_names(&names, list) == 0) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t at = 0; at < names.n; at++)
            if (syscall(SYS_renameat2, old_fd, names.texts[at], new_fd, names.texts[at], flags) < 0)
                names.errnos[at] = errno;
        Py_END_ALLOW_THREADS
        result = refused(&names, list);
    }
    free_names(&names);
    return result;
}
