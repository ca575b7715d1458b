/* The module: Core, one per mount; CoreRings, one per CPU core; CoreDevice, one per reader thread; TablesMutex, Tables,
 * Node and Prefetcher. */
#include "core.h"

static PyObject *core_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *words[] = {"calls", "mutex", "nodes", "cells", "rests", "cell_of", "layout", "mount_fd", "statx_flags",
                            "is_measured", "is_flushed", "shows_xattrs", "is_for_all", "hides_labels", "hides_trash",
                            "lifetime_s", "quick_ns", "nobody_gid", "at_rest", "no_capabilities", NULL};
    const char *cell_of, *at_rest, *no_capabilities;
    Py_ssize_t n_cell_of, n_at_rest, n_none;
    Core *self = (Core *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOw*w*y#(iiiiii)iippppppdKIy#y#", words, &self->calls,
                                     &self->mutex, &self->nodes, &self->cells, &self->rests, &cell_of, &n_cell_of,
                                     &self->n_buckets, &self->first_bits, &self->n_failed, &self->n_total, &self->n_max,
                                     &self->n_first_bucket, &self->mount_fd, &self->statx_flags, &self->is_measured,
                                     &self->is_flushed, &self->shows_xattrs, &self->is_for_all, &self->hides_labels,
                                     &self->hides_trash, &self->lifetime_s, &self->quick_ns, &self->nobody_gid,
                                     &at_rest, &n_at_rest, &no_capabilities, &n_none)) {
        self->calls = self->nodes = NULL, self->mutex = NULL; /* still borrowed: not to be freed */
        Py_DECREF(self);
        return NULL;
    }
    Py_INCREF(self->calls);
    Py_INCREF((PyObject *)self->mutex);
    Py_INCREF(self->nodes);
    if (n_cell_of != sizeof self->cell_of || n_at_rest != sizeof self->at_rest ||
        n_none != sizeof self->no_capabilities) {
        PyErr_SetString(PyExc_ValueError, "counters or capabilities have another size");
        Py_DECREF(self);
        return NULL;
    }
    memcpy(self->cell_of, cell_of, sizeof self->cell_of);
    memcpy(self->at_rest, at_rest, sizeof self->at_rest);
    memcpy(self->no_capabilities, no_capabilities, sizeof self->no_capabilities);
    self->cell = self->cells.buf;
    self->tables = &((TablesObject *)self->nodes)->tables;
    self->root_dev = self->tables->root_dev, self->is_shared = self->tables->is_shared;
    self->device = self->watch_wake_fd = -1;
    self->has_getxattrat = has_getxattrat_calls(), self->acts_as_others = !geteuid();
    ssize_t n_name = readlink("/proc/self/ns/user", self->user_namespace, sizeof self->user_namespace - 1);
    self->user_namespace[n_name > 0 ? n_name : 0] = 0;
    return (PyObject *)self;
}

static void core_free(Core *self) {
    PyBuffer_Release(&self->cells);
    PyBuffer_Release(&self->rests);
    Py_XDECREF(self->calls);
    Py_XDECREF((PyObject *)self->mutex);
    Py_XDECREF(self->nodes);
    Py_XDECREF(self->requests);
    free_object(self);
}

static PyObject *core_connect(Core *self, PyObject *args) {
    PyObject *requests;
    if (!PyArg_ParseTuple(args, "iiO", &self->device, &self->watch_wake_fd, &requests))
        return NULL;
    Py_XDECREF(self->requests);
    self->requests = Py_NewRef(requests);
    Py_RETURN_NONE;
}

static PyObject *core_note_watch_sleeps(Core *self, PyObject *Py_UNUSED(nothing)) {
    __atomic_store_n(&self->watch_sleeps, true, __ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyObject *core_count(Core *self, PyObject *args) {
    unsigned at;
    unsigned long long took_ns;
    int has_failed;
    if (!PyArg_ParseTuple(args, "IKp", &at, &took_ns, &has_failed))
        return NULL;
    count(self, at, took_ns, has_failed);
    Py_RETURN_NONE;
}

static PyMethodDef core_methods[] = {
    {"connect", (PyCFunction)core_connect, METH_VARARGS,
     "Serve requests: /dev/fuse, an eventfd that is written to when a request begins while the watch sleeps, and the "
     "FuseRequests that serves the other requests."},
    {"do", (PyCFunction)core_do, METH_VARARGS,
     "Serve a whole request, without the tables lock. Returns the body of its reply.\n\n"
     "held    an fd of the inode that the request names, which may have lost that name\n"
     "Raises  OSError: its errno is the reply"},
    {"open_node", (PyCFunction)core_open_node, METH_O,
     "Return an O_PATH fd of a node, or another fd of it. Raises  OSError: ESTALE: it can't be found any more"},
    {"count", (PyCFunction)core_count, METH_VARARGS, "Count a request that Python has replied to."},
    {"note_watch_sleeps", (PyCFunction)core_note_watch_sleeps, METH_NOARGS,
     "Have the eventfd written to when a request begins."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot core_slots[] = {
    {Py_tp_doc, "The native core of one mount: serves its requests, on the same tables as the Python code."},
    {Py_tp_new, core_new},
    {Py_tp_dealloc, core_free},
    {Py_tp_methods, core_methods},
    {0, NULL},
};
static PyType_Spec core_spec = TYPE("Core", Core, true, core_slots);

static PyObject *close_unused_fds(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing)) {
    end_uses();
    if (has_fds_to_close()) {
        PyThreadState *released = PyEval_SaveThread();
        close_fds();
        PyEval_RestoreThread(released);
    }
    Py_RETURN_NONE;
}

static PyObject *most_of(PyObject *Py_UNUSED(module), PyObject *n) {
    long long number = PyLong_AsLongLong(n);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(max_handles_of_user(number));
}

static PyMethodDef functions[] = {
    {"max_handles_of_user", most_of, METH_O, "How many of n handles a single user gets, other than root."},
    {"close_unused_fds", close_unused_fds, METH_NOARGS,
     "End the uses of fds by this thread's operation, and close those that nobody uses; without the tables' lock."},
    {NULL, NULL, 0, NULL},
};

static int begin(PyObject *module) {
    const struct {
        PyType_Spec *spec;
        PyTypeObject **type;
    } types[] = {
        {&core_spec, NULL}, {&core_device_spec, NULL}, {&rings_spec, NULL}, {&entry_reply_spec, &entry_reply_type},
        {&tables_spec, NULL}, {&tables_mutex_spec, NULL}, {&node_spec, &node_type}, {&fd_use_spec, &fd_use_type},
        {&prefetcher_spec, NULL},
    };
    for (size_t at = 0; at < sizeof types / sizeof *types; at++) {
        PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(types[at].spec);
        if (type == NULL || PyModule_AddType(module, type) < 0)
            return -1;
        if (types[at].type != NULL)
            *types[at].type = (PyTypeObject *)Py_NewRef((PyObject *)type);
        Py_DECREF(type);
    }
    return import_types() < 0 ? -1 : PyModule_AddIntConstant(module, "N_RING_THREADS", N_RING_THREADS);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, begin}, {0, NULL}};
static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_core", .m_doc = "The native core; see core.h.", .m_methods = functions,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module); }
