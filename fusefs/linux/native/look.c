/* Calls statx for many names, and returns those that match the bounds. */
#include "look.h"

enum { SYNC = AT_STATX_DONT_SYNC, FLAGS = AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | SYNC };
enum { BLOCK = 512 };

static bool is_in(const struct statx_timestamp *time, int64_t from_ns, int64_t to_ns) {
    __int128 ns = (__int128)time->tv_sec * 1000000000 + time->tv_nsec;
    return (from_ns == -INT64_MAX || from_ns <= ns) && (to_ns == INT64_MAX || ns <= to_ns);
}

static bool takes(const struct bounds *bounds, const struct statx *told) {
    int64_t size = (int64_t)told->stx_size;
    if (!(bounds->kinds >> (told->stx_mode >> 12) & 1) || size < bounds->least_size || size > bounds->most_size)
        return false;
    if ((bounds->uid >= 0 && bounds->uid != told->stx_uid) || (bounds->gid >= 0 && bounds->gid != told->stx_gid))
        return false;
    if (bounds->must_be_empty && !S_ISDIR(told->stx_mode) && !(S_ISREG(told->stx_mode) && !size))
        return false;
    if (bounds->asks_birth) {
        bool is_known = told->stx_mask & STATX_BTIME && (told->stx_btime.tv_sec || told->stx_btime.tv_nsec);
        if (!is_known || !is_in(&told->stx_btime, bounds->times[3].from_ns, bounds->times[3].to_ns))
            return false;
    }
    return is_in(&told->stx_mtime, bounds->times[0].from_ns, bounds->times[0].to_ns) &&
           is_in(&told->stx_atime, bounds->times[1].from_ns, bounds->times[1].to_ns) &&
           is_in(&told->stx_ctime, bounds->times[2].from_ns, bounds->times[2].to_ns);
}

int look(int fd, const char *name, const struct bounds *bounds, struct size *size) {
    struct statx told;
    if (statx(fd, name, FLAGS, STATX_BASIC_STATS | STATX_BTIME, &told) < 0 ||
        !(told.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) || told.stx_attributes & STATX_ATTR_MOUNT_ROOT)
        return UNSURE;
    if (!takes(bounds, &told))
        return 0;
    size->length = told.stx_size;
    size->taken = told.stx_nlink == 1 ? told.stx_blocks * BLOCK : 0;
    return CHOSEN;
}

static int tell(PyObject *told[], PyObject *name, const struct size *size) {
    return PyList_Append(told[0], name) < 0 || append(told[1], PyLong_FromUnsignedLongLong(size->length)) < 0 ||
                   append(told[2], PyLong_FromUnsignedLongLong(size->taken)) < 0
               ? -1
               : 0;
}

static PyObject *sorted(const struct names *names, PyObject *list, const struct size *sizes) {
    PyObject *told[] = {PyList_New(0), PyList_New(0), PyList_New(0), PyList_New(0)}, *result = NULL;
    if (told[0] == NULL || told[1] == NULL || told[2] == NULL || told[3] == NULL)
        goto end;
    for (Py_ssize_t at = 0; at < names->n; at++) {
        PyObject *name = PyList_GetItem(list, at);
        if (names->errnos[at] == UNSURE && PyList_Append(told[3], name) < 0)
            goto end;
        if (names->errnos[at] == CHOSEN && tell(told, name, &sizes[at]) < 0)
            goto end;
    }
    result = PyTuple_Pack(4, told[0], told[1], told[2], told[3]);
end:
    for (size_t at = 0; at < sizeof told / sizeof *told; at++)
        Py_XDECREF(told[at]);
    return result;
}

int take_bounds(struct bounds *bounds, const char *packed, Py_ssize_t size) {
    if (size != sizeof *bounds) {
        PyErr_SetString(PyExc_ValueError, "bounds have another size");
        return -1;
    }
    memcpy(bounds, packed, sizeof *bounds);
    return 0;
}

PyObject *bulk_look(PyObject *module, PyObject *args) {
    (void)module;
    int fd;
    PyObject *list, *told = NULL;
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
                names.errnos[at] = look(fd, names.texts[at], &bounds, &sizes[at]);
            Py_END_ALLOW_THREADS
            told = sorted(&names, list, sizes);
        }
    }
    PyMem_Free(sizes);
    free_names(&names);
    return told;
}
