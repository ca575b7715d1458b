/* unlinkat for many names. */
#include "bulk.h"

PyObject *bulk_unlink(PyObject *module, PyObject *args) {
    (void)module;
    int fd, flags;
    PyObject *list, *result = NULL;
    struct names names;
    if (!PyArg_ParseTuple(args, "iOi", &fd, &list, &flags))
        return NULL;
    if (take_names(&names, list) == 0) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t at = 0; at < names.n; at++)
            if (unlinkat(fd, names.texts[at], flags) < 0)
                names.errnos[at] = errno;
        Py_END_ALLOW_THREADS
        result = refused(&names, list);
    }
    free_names(&names);
    return result;
}
