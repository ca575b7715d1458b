/* Calls statx for many names, and returns those that match the bounds. */
#include "look.h"

enum { SYNC = AT_STATX_DONT_SYNC, FLAGS = AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | SYNC };
enum { BLOCK = 512 };

static bool is_in(const struct statx_timestamp *time, int64_t from_ns, int64_t to_ns) {
    __int128 ns = (__int128)time->tv_sec * 1000000000 + time->tv_nsec;
    return (from_ns == -INT64_MAX || from_ns <= ns) && (to_ns == INT64_MAX || ns <= to_ns);
}

static bool is_match(const struct bounds *bounds, const struct statx *st) {
    int64_t size = (int64_t)st->stx_size;
    if (!(bounds->kinds >> (st->stx_mode >> 12) & 1) || size < bounds->least_size || size > bounds->most_size)
        return false;
    if ((bounds->uid >= 0 && bounds->uid != st->stx_uid) || (bounds->gid >= 0 && bounds->gid != st->stx_gid))
        return false;
    if (bounds->must_be_empty && !S_ISDIR(st->stx_mode) && !(S_ISREG(st->stx_mode) && !size))
        return false;
    if (bounds->asks_birth) {
        bool is_known = st->stx_mask & STATX_BTIME && (st->stx_btime.tv_sec || st->stx_btime.tv_nsec);
        if (!is_known || !is_in(&st->stx_btime, bounds->times[3].from_ns, bounds->times[3].to_ns))
            return false;
    }
    return is_in(&st->stx_mtime, bounds->times[0].from_ns, bounds->times[0].to_ns) &&
           is_in(&st->stx_atime, bounds->times[1].from_ns, bounds->times[1].to_ns) &&
           is_in(&st->stx_ctime, bounds->times[2].from_ns, bounds->times[2].to_ns);
}

int match_name(int fd, const char *name, const struct bounds *bounds, struct size *size) {
    struct statx st;
    if (statx(fd, name, FLAGS, STATX_BASIC_STATS | STATX_BTIME, &st) < 0 ||
        !(st.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) || st.stx_attributes & STATX_ATTR_MOUNT_ROOT)
        return UNSURE;
    if (!is_match(bounds, &st))
        return 0;
    size->length = st.stx_size;
    size->taken = st.stx_nlink == 1 ? st.stx_blocks * BLOCK : 0;
    return CHOSEN;
}

static int add_match(PyObject *lists[], PyObject *name, const struct size *size) {
    return PyList_Append(lists[0], name) < 0 || append(lists[1], PyLong_FromUnsignedLongLong(size->length)) < 0 ||
                   append(lists[2], PyLong_FromUnsignedLongLong(size->taken)) < 0
               ? -1
               : 0;
}

static PyObject *sorted(const struct names *names, PyObject *list, const struct size *sizes) {
    PyObject *lists[] = {PyList_New(0), PyList_New(0), PyList_New(0), PyList_New(0)}, *result = NULL;
    if (lists[0] == NULL || lists[1] == NULL || lists[2] == NULL || lists[3] == NULL)
        goto end;
    for (Py_ssize_t at = 0; at < names->n; at++) {
        PyObject *name = PyList_GetItem(list, at);
        if (names->errnos[at] == UNSURE && PyList_Append(lists[3], name) < 0)
            goto end;
        if (names->errnos[at] == CHOSEN && add_match(lists, name, &sizes[at]) < 0)
            goto end;
    }
    result = PyTuple_Pack(4, lists[0], lists[1], lists[2], lists[3]);
end:
    for (size_t at = 0; at < sizeof lists / sizeof *lists; at++)
        Py_XDECREF(lists[at]);
    return result;
}

int take_bounds(struct bounds *bounds, const char *packed, Py_ssize_t size) {
    if (size != sizeof *bounds) {
        PyErr_SetString(PyExc_ValueError, "the bounds have the wrong size");
        return -1;
    }
    memcpy(bounds, packed, sizeof *bounds);
    return 0;
}

PyObject *bulk_look(PyObject *module, PyObject *args) {
    (void)module;
    int fd;
    PyObject *list, *result = NULL;
    const char *packed;
    Py_ssize_t n_packed;
    struct bounds bounds;
    struct names names;
    if (!PyArg_ParseTuple(args, "iOy#", &fd, &list, &packed, &n_packed) || take_bounds(&bounds, packed, n_packed) < 0)
        return NULL;
    struct size *sizes = NULL;
    if (take_names(&names, list) == 0) {
        sizes = PyMem_Calloc(names.n ? (size_t)names.n : 1, sizeof *sizes);
        if (sizes == NULL) {
            PyErr_NoMemory();
        } else {
            Py_BEGIN_ALLOW_THREADS
            for (Py_ssize_t at = 0; at < names.n; at++)
                names.errnos[at] = match_name(fd, names.texts[at], &bounds, &sizes[at]);
            Py_END_ALLOW_THREADS
            result = sorted(&names, list, sizes);
        }
    }
    PyMem_Free(sizes);
    free_names(&names);
    return result;
}
