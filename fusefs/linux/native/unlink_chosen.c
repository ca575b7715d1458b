/* Calls statx for many names, and unlinks each match at once, while the inode is in the processor's cache. */
#include "look.h"

/* Returns 0, UNSURE, or the negated errno of unlinkat. A removed file's sizes are added to the sum. */
static int unlink_if_chosen(int look_fd, int unlink_fd, const char *name, const struct bounds *bounds, struct size *sum,
                            uint64_t *n_removed) {
    struct size size;
    int match = match_name(look_fd, name, bounds, &size);
    if (match != CHOSEN)
        return match;
    if (unlinkat(unlink_fd, name, 0) < 0)
        return -errno;
    *n_removed += 1;
    sum->length += size.length;
    sum->taken += size.taken;
    return 0;
}

/* Return the totals, the refused names with their errnos, and the names that are UNSURE. */
static PyObject *unlink_results(struct names *names, PyObject *list, const struct size *sum, uint64_t n_removed) {
    PyObject *unsure = PyList_New(0), *refusals = NULL, *result = NULL;
    if (unsure == NULL)
        return NULL;
    for (Py_ssize_t at = 0; at < names->n; at++) {
        if (names->errnos[at] == UNSURE && PyList_Append(unsure, PyList_GetItem(list, at)) < 0)
            goto end;
        names->errnos[at] = names->errnos[at] < 0 ? -names->errnos[at] : 0;
    }
    refusals = refused(names, list);
    if (refusals != NULL)
        result = Py_BuildValue("KKKOO", n_removed, sum->length, sum->taken, refusals, unsure);
end:
    Py_XDECREF(refusals);
    Py_DECREF(unsure);
    return result;
}

PyObject *bulk_unlink_chosen(PyObject *module, PyObject *args) {
    (void)module;
    int look_fd, unlink_fd;
    PyObject *list, *result = NULL;
    const char *packed;
    Py_ssize_t n_packed;
    struct bounds bounds;
    struct names names;
    if (!PyArg_ParseTuple(args, "iiOy#", &look_fd, &unlink_fd, &list, &packed, &n_packed) ||
        take_bounds(&bounds, packed, n_packed) < 0)
        return NULL;
    if (take_names(&names, list) == 0) {
        struct size sum = {0, 0};
        uint64_t n_removed = 0;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t at = 0; at < names.n; at++)
            names.errnos[at] = unlink_if_chosen(look_fd, unlink_fd, names.texts[at], &bounds, &sum, &n_removed);
        Py_END_ALLOW_THREADS
        result = unlink_results(&names, list, &sum, n_removed);
    }
    free_names(&names);
    return result;
}
