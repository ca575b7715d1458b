/* The module: Core, one mount's; CoreRing and CoreDevice, one thread's; TablesMutex, Tables, Node and Prefetcher. */
#include "core.h"

#define TAKE(part)                                                                                                     \
    self->part = PyDict_GetItemString(parts, #part);                                                                   \
    if (self->part == NULL) {                                                                                          \
        PyErr_SetString(PyExc_KeyError, #part);                                                                        \
        goto error;                                                                                                    \
    }                                                                                                                  \
    Py_INCREF(self->part);
#define RELEASE(part) Py_XDECREF(self->part);

static int take_cells(Core *self, PyObject *cells, PyObject *cell_of) {
    PyObject *opcode, *at;
    Py_ssize_t position = 0;
    if (PyObject_GetBuffer(cells, &self->cells, PyBUF_WRITABLE) < 0)
        return -1;
    self->cell = self->cells.buf;
    while (PyDict_Next(cell_of, &position, &opcode, &at)) {
        long number = PyLong_AsLong(opcode);
        if (number < 0 || number >= (long)(sizeof self->cell_of / sizeof *self->cell_of)) {
            PyErr_SetString(PyExc_ValueError, "no such opcode");
            return -1;
        }
        self->cell_of[number] = (uint32_t)PyLong_AsLong(at);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *core_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *words[] = {"parts", "cells", "rests", "cell_of", "layout", "mount_fd", "root_dev", "statx_flags",
                            "is_shared", "is_flushed", "shows_xattrs", "is_for_all", "hides_labels",
                            "acts_as_others", "hides_trash",
                            "lifetime_s", "quick_ns", "nobody_gid", "at_rest", "no_capabilities", NULL};
    PyObject *parts, *cells, *rests, *cell_of;
    int is_shared, is_flushed, shows_xattrs, is_for_all, hides_labels, acts_as_others, hides_trash;
    unsigned long long root_dev, quick_ns;
    const char *at_rest, *no_capabilities;
    Py_ssize_t n_at_rest, n_none;
    Core *self = (Core *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!OOO!(iiiiii)iKipppppppdKIy#y#", words, &PyDict_Type, &parts,
                                     &cells, &rests, &PyDict_Type, &cell_of, &self->n_buckets, &self->first_bits,
                                     &self->n_failed, &self->n_total, &self->n_max, &self->n_first_bucket,
                                     &self->mount_fd, &root_dev, &self->statx_flags, &is_shared, &is_flushed, &shows_xattrs,
                                     &is_for_all, &hides_labels, &acts_as_others, &hides_trash,
                                     &self->lifetime_s, &quick_ns,
                                     &self->nobody_gid,
                                     &at_rest, &n_at_rest, &no_capabilities, &n_none))
        goto error;
    self->device = self->wake_fd = -1;
    self->root_dev = root_dev, self->quick_ns = quick_ns;
    self->is_shared = is_shared, self->is_flushed = is_flushed;
    self->shows_xattrs = shows_xattrs, self->is_for_all = is_for_all, self->has_getxattrat = can_getxattrat(), self->hides_labels = hides_labels;
    self->acts_as_others = acts_as_others, self->hides_trash = hides_trash;
    if (n_at_rest != sizeof self->at_rest || n_none != sizeof self->no_capabilities) {
        PyErr_SetString(PyExc_ValueError, "capabilities have another size");
        goto error;
    }
    memcpy(self->at_rest, at_rest, sizeof self->at_rest);
    memcpy(self->no_capabilities, no_capabilities, sizeof self->no_capabilities);
    ssize_t n_name = readlink("/proc/self/ns/user", self->user_namespace, sizeof self->user_namespace - 1);
    self->user_namespace[n_name > 0 ? n_name : 0] = 0;
    PARTS(TAKE)
    self->mutex = (TablesMutex *)self->mutex_of;
    self->tables = &((TablesObject *)self->nodes)->tables;
    if (PyObject_GetBuffer(rests, &self->rests, PyBUF_SIMPLE) < 0)
        goto error;
    if (take_cells(self, cells, cell_of) < 0)
        goto error;
    return (PyObject *)self;
error:
    Py_DECREF(self);
    return NULL;
}

static void core_free(Core *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->cells.buf != NULL)
        PyBuffer_Release(&self->cells);
    if (self->rests.buf != NULL)
        PyBuffer_Release(&self->rests);
    PARTS(RELEASE)
    Py_XDECREF(self->number);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Core.connect */
static PyObject *core_connect(Core *self, PyObject *args) {
    PyObject *number;
    if (!PyArg_ParseTuple(args, "iiO", &self->device, &self->wake_fd, &number))
        return NULL;
    Py_XDECREF(self->number);
    self->number = Py_NewRef(number);
    Py_RETURN_NONE;
}

static PyObject *core_sleep(Core *self, PyObject *Py_UNUSED(nothing)) {
    __atomic_store_n(&self->watch_sleeps, true, __ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyMethodDef core_methods[] = {
    {"connect", (PyCFunction)core_connect, METH_VARARGS, "Answer requests: /dev/fuse, an eventfd that is written to when a request begins while the watch sleeps, and what replies to what made a node when that has its own number."},
    {"do", (PyCFunction)core_do, METH_VARARGS, "Do a whole request, without the tables' lock; the body of its reply.\n\nheld    an fd of what the request is about, which need not have the name any more\nRaises  OSError: its errno is the reply"},
    {"hold", (PyCFunction)core_hold, METH_O, "An O_PATH fd of a node, or another of it; OSError ESTALE: it is not to be found any more."},
    {"sleep", (PyCFunction)core_sleep, METH_NOARGS, "Have `wake_fd` written to when a request begins."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot core_slots[] = {
    {Py_tp_doc, "What does the requests of one mount, on the tables that the Python code works on."},
    {Py_tp_new, core_new},
    {Py_tp_dealloc, core_free},
    {Py_tp_methods, core_methods},
    {0, NULL},
};
static PyType_Spec core_spec = {
    .name = "fusefs.mount.native._core.Core",
    .basicsize = sizeof(Core),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = core_slots,
};

static int begin(PyObject *module) {
    PyType_Spec *specs[] = {&core_spec, &core_ring_spec, &core_device_spec, &tables_mutex_spec, &prefetcher_spec};
    for (size_t at = 0; at < sizeof specs / sizeof *specs; at++) {
        PyObject *type = PyType_FromSpec(specs[at]);
        if (type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0)
            return -1;
        Py_DECREF(type);
    }
    return add_tables(module);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, begin}, {0, NULL}};
static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_core", .m_doc = "The native core; see core.h.", .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module); }
