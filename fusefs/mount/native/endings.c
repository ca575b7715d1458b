/* What becomes of nodes: they lose names, get others, and end when the kernel forgets them. As NameOperations._lost and
 * _moved, and NodeReferences.forget, do it with what is plain: one name, known here, in a directory outside of stores. */
#include "core.h"

enum {
    PAIR_BYTES = 16,      /* struct fuse_forget_one */
    N_FORGOTTEN_MAX = 64, /* in one go, with the tables' lock; Python forgets more in parts (fuse_operations.PART) */
};

/* Call something of Python's for what it does. Returns 0, or -1 with an exception. */
static int done(PyObject *nothing) {
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

/* The node of an incarnation that has just this one name, of which all is known in this epoch; borrowed. NULL: it is
 * not so plain; `is_known` says whether there is a node at all. */
static PyObject *plain_at(Request *request, PyObject *source, const Place *place, bool *is_known) {
    Core *core = request->core;
    PyObject *node = PyDict_GetItemWithError(core->by_source, source);
    uint64_t epoch, now, nodeid;
    *is_known = node != NULL || PyErr_Occurred();
    if (node == NULL || number_of(node, names.nodeid, &nodeid) < 0)
        return NULL;
    note_change(request, nodeid);
    if (request->was_away || !is_none(node, names.others) || is_at(node, place, place->name) != 1 ||
        number_of(node, names.epoch, &epoch) < 0 || number_of(core->nodes, names._epoch, &now) < 0 || epoch != now)
        return NULL;
    return PyErr_Occurred() ? NULL : node;
}

static int lose_by_python(Core *core, PyObject *source, const Seen *seen, const Place *place) {
    PyObject *told = attributes_of(core, seen);
    if (told == NULL)
        return -1;
    int error = done(PyObject_CallFunctionObjArgs(core->lost, source, told, place->node, place->name, NULL));
    Py_DECREF(told);
    return error;
}

/* It was the last name, and nobody has it open: all that is told of it from now on is what it was. */
static int detach(Core *core, PyObject *node, PyObject *source, const Seen *seen) {
    Seen without_links = *seen;
    without_links.nlink = 0;
    PyObject *last = attributes_of(core, &without_links);
    int error = last == NULL ? -1 : PyObject_SetAttr(node, names.last, last);
    Py_XDECREF(last);
    return error < 0 ? -1 : PyDict_DelItem(core->by_source, source);
}

/* An incarnation lost a name. Returns 0, or -1 with an exception. */
int lose(Request *request, PyObject *source, const Seen *seen, const Place *place) {
    Core *core = request->core;
    bool is_known, is_last = S_ISDIR(seen->mode) || seen->nlink == 1;
    uint64_t n_open;
    PyObject *node = plain_at(request, source, place, &is_known);
    if (PyErr_Occurred())
        return -1;
    if (!is_known && !request->was_away)
        return 0;
    if (node == NULL || PyDict_GetItemWithError(core->open_directories, node) != NULL)
        return lose_by_python(core, source, seen, place);
    if (PyErr_Occurred() || number_of(node, names.n_open, &n_open) < 0 ||
        PyObject_SetAttr(node, names.parent, Py_None) < 0 || PyObject_SetAttr(node, names.name, core->nameless) < 0)
        return -1;
    return is_last && !n_open ? detach(core, node, source, seen) : 0;
}

/* An incarnation has another name: a file anywhere, a directory in the same one. Returns 0, or -1 with an exception. */
int move(Request *request, PyObject *source, const Place *old, const Place *new) {
    Core *core = request->core;
    bool is_known;
    PyObject *node = plain_at(request, source, old, &is_known);
    if (PyErr_Occurred())
        return -1;
    if (!is_known && !request->was_away)
        return 0;
    if (node == NULL || is_true(node, names.is_directory)) {
        PyObject *from = PyTuple_Pack(2, old->node, old->name), *to = PyTuple_Pack(2, new->node, new->name);
        int error = from == NULL || to == NULL
                        ? -1
                        : done(PyObject_CallFunctionObjArgs(core->moved, source, from, to, NULL));
        Py_XDECREF(from);
        Py_XDECREF(to);
        return error;
    }
    if (PyObject_SetAttr(node, names.parent, new->node) < 0 || PyObject_SetAttr(node, names.name, new->name) < 0)
        return -1;
    if (is_true(node, names.is_told))
        return done(PyObject_CallMethodObjArgs(core->timeouts, names.renew, node, NULL));
    return PyErr_Occurred() ? -1 : 0;
}

/* Forget a key of a dict, if it has that. */
static int without(PyObject *dict, PyObject *key) {
    int has = PyDict_Size(dict) ? PyDict_Contains(dict, key) : 0;
    return has > 0 ? PyDict_DelItem(dict, key) : has;
}

/* The kernel lets go of so many references. Returns 0, or -1 with an exception. */
static int forget_one(Core *core, PyObject *nodeid, uint64_t n) {
    PyObject *node = PyDict_GetItemWithError(core->by_nodeid, nodeid), *source = NULL;
    uint64_t n_known, n_open;
    if (node == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (number_of(node, names.nlookup, &n_known) < 0 || number_of(node, names.n_open, &n_open) < 0)
        return -1;
    uint64_t n_left = n < n_known ? n_known - n : 0;
    if (set_number(node, names.nlookup, (int64_t)n_left) < 0)
        return -1;
    if (n_left || n_open || is_root(core, PyLong_AsUnsignedLongLong(nodeid)))
        return 0;
    if (PySet_Contains(core->mapped, node) || PyDict_Contains(core->open_directories, node) ||
        PyDict_Contains(core->queues, node) || PyDict_Size(core->retries))
        return PyErr_Occurred() ? -1 : done(PyObject_CallFunctionObjArgs(core->unused, node, NULL));
    Py_INCREF(node);
    source = PyObject_GetAttr(node, names.source);
    int error = source == NULL || PyDict_DelItem(core->by_nodeid, nodeid) < 0 ? -1 : 0;
    if (!error && PyDict_GetItemWithError(core->by_source, source) == node)
        error = PyDict_DelItem(core->by_source, source);
    if (!error)
        error = PyErr_Occurred() || without(core->pages, node) < 0 ||
                        PySet_Discard(core->told, nodeid) < 0 || without(core->changed_s, nodeid) < 0
                    ? -1
                    : 0;
    Py_DECREF(node);
    Py_XDECREF(source);
    return error;
}

/* The kernel lets go of many nodes: pairs of nodeid and number, 64 bits each. Returns 0, or -1 with an exception. */
static int forget_pairs(Core *core, const char *pairs, size_t n_bytes) {
    int error = 0;
    for (size_t at = 0; at + PAIR_BYTES <= n_bytes && !error; at += PAIR_BYTES) {
        uint64_t pair[2];
        memcpy(pair, pairs + at, sizeof pair);
        PyObject *nodeid = PyLong_FromUnsignedLongLong(pair[0]);
        error = nodeid == NULL ? -1 : forget_one(core, nodeid, pair[1]);
        Py_XDECREF(nodeid);
    }
    return error;
}

/* For Python, which has the tables' lock. */
PyObject *core_forget(Core *core, PyObject *pairs) {
    Py_buffer view;
    if (PyObject_GetBuffer(pairs, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    int error = forget_pairs(core, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    if (error)
        return NULL;
    Py_RETURN_NONE;
}

/* A client waits for neither, so an error is in the log only. */
static int forgotten(Request *request, const char *pairs, size_t n_bytes) {
    if (forget_pairs(request->core, pairs, n_bytes) < 0)
        failed(request->core);
    return NO_ANSWER;
}

int do_forget(Request *request) {
    uint64_t pair[2] = {request->nodeid};
    memcpy(&pair[1], request->own, sizeof pair[1]);
    return forgotten(request, (const char *)pair, sizeof pair);
}

int do_batch_forget(Request *request) {
    uint32_t n;
    memcpy(&n, request->own, sizeof n);
    if (n > N_FORGOTTEN_MAX || request->n_payload != n * PAIR_BYTES)
        return NOT_OURS;
    return forgotten(request, request->payload, request->n_payload);
}
