/* What becomes of nodes: they lose names, get others, and end when the kernel forgets them; as NameOperations._lost and
 * _moved, and NodeReferences.forget. */
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

/* The node of what was seen; NULL: none. */
static Node *node_seen(Request *request, const Seen *seen) {
    Source source = source_of(seen);
    Node *node = find_node(request->core->tables, &source);
    if (node != NULL)
        note_change(request, node);
    return node;
}

/* An incarnation lost a name. Returns 0, or -1 with an exception. */
int lose(Request *request, const Seen *seen, const Place *place) {
    Core *core = request->core;
    Node *node = node_seen(request, seen);
    if (request->was_away && (S_ISDIR(seen->mode) || seen->nlink == 1)) {
        Source source = source_of(seen);
        PyObject *key = source_object(&source);
        int error = key == NULL ? -1 : done(PyObject_CallFunctionObjArgs(core->ended, key, NULL));
        Py_XDECREF(key);
        if (error)
            return error;
    }
    if (node == NULL)
        return 0;
    take_away_name(core->tables, node, place->node, place->name);
    if (!node->n_open && (node->is_directory || seen->nlink == 1))
        detach_node(core->tables, node, seen);
    if (node->is_directory)
        drop_directory_fd(core->tables, node);
    return 0;
}

/* An incarnation has another name. Returns 0, or -1 with an exception. */
int move(Request *request, const Seen *seen, const Place *old, const Place *new) {
    Core *core = request->core;
    Node *node = node_seen(request, seen);
    if (node == NULL)
        return 0;
    move_node(core->tables, node, old->node, old->name, new->node, new->name);
    if (node->is_directory)
        changed(core->tables, node);
    else if (node->is_told)
        renew(core->tables, node);
    if (zone_of(core->tables, new->node) != TRASH)
        return 0;
    PyObject *directory = object_of(new->node), *moved = object_of(node);
    int error = done(PyObject_CallFunctionObjArgs(core->stored, directory, moved, NULL));
    Py_XDECREF(directory);
    Py_XDECREF(moved);
    return error;
}

/* Have Python end a node that nobody refers to, and forget what it has of that. Returns 0, or -1 with an exception. */
int tell_unused(Core *core, Node *node) {
    PyObject *object = object_of(node);
    int error = object == NULL ? -1 : done(PyObject_CallFunctionObjArgs(core->unused, object, NULL));
    Py_XDECREF(object);
    return error;
}

/* The kernel lets go of so many references. Returns 0, or -1 with an exception. */
static int forget_one(Core *core, uint64_t nodeid, uint64_t n) {
    Node *node = node_of(core->tables, nodeid);
    if (node == NULL)
        return 0;
    if (node->object == NULL && !node->is_mapped) {
        forget_node(core->tables, node, n);
        return 0;
    }
    node->nlookup -= n < node->nlookup ? n : node->nlookup;
    return node->nlookup || node->n_open ? 0 : tell_unused(core, node);
}

/* The kernel lets go of many nodes: pairs of nodeid and number, 64 bits each. Returns 0, or -1 with an exception. */
static int forget_pairs(Core *core, const char *pairs, size_t n_bytes) {
    int error = 0;
    for (size_t at = 0; at + PAIR_BYTES <= n_bytes && !error; at += PAIR_BYTES) {
        uint64_t pair[2];
        memcpy(pair, pairs + at, sizeof pair);
        error = forget_one(core, pair[0], pair[1]);
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
