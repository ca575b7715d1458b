/* The Python type Tables: a thin object over the C structure. Callers hold the tables lock. */
#include "core.h"

static PyObject *tables_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *words[] = {"source", "seen", "root", "n_fds", "n_handles", "is_for_all", "is_shared", "racy_ns", NULL};
    int root_fd = -1, is_for_all = true, is_shared = false;
    unsigned n_fds = 0;
    long long n_handles = 0, racy_ns = 0;
    Source source;
    Stat st;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O&O&|$iILppL", words, to_source, &source, to_stat, &st, &root_fd,
                                     &n_fds, &n_handles, &is_for_all, &is_shared, &racy_ns))
        return NULL;
    source.ino = st.ino, source.btime_ns = st.btime_ns;
    TablesObject *self = (TablesObject *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    Tables *t = &self->tables;
    tables_make(t, &source, root_fd);
    t->n_fds = t->n_directories_max = n_fds, t->n_handles_max = n_handles;
    t->is_trash_renewed = true;
    t->is_for_all = is_for_all, t->is_shared = is_shared, t->racy_ns = racy_ns;
    return (PyObject *)self;
}

static void tables_dealloc(TablesObject *self) {
    tables_free(&self->tables);
    close_fds();
    free_object(self);
}

static Py_ssize_t tables_length(TablesObject *self) { return (Py_ssize_t)self->tables.n_nodes; }

static PyObject *tables_root(TablesObject *self, void *Py_UNUSED(field)) { return object_of(self->tables.root); }

static int by_age(const void *one, const void *other) {
    uint64_t number = (*(Node *const *)one)->number, than = (*(Node *const *)other)->number;
    return number < than ? -1 : number > than;
}

/* Iterate over all nodes, in the order in which they were made. */
static PyObject *tables_iter(TablesObject *self) {
    const Tables *t = &self->tables;
    Node **nodes = allocate(NULL, t->n_nodes * sizeof *nodes);
    size_t n = 0;
    for (uint64_t at = 0; at < t->n_buckets; at++)
        for (Node *node = t->by_nodeid[at]; node != NULL; node = node->next_by_nodeid)
            nodes[n++] = node;
    qsort(nodes, n, sizeof *nodes, by_age);
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t at = 0; list != NULL && at < n; at++) {
        PyObject *object = object_of(nodes[at]);
        if (object == NULL || PyList_SetItem(list, (Py_ssize_t)at, object) < 0)
            Py_CLEAR(list);
    }
    free(nodes);
    PyObject *found = list == NULL ? NULL : PyObject_GetIter(list);
    Py_XDECREF(list);
    return found;
}

static PyObject *none(void) { return Py_NewRef(Py_None); }

/* Nodes. */

static PyObject *tables_get(TablesObject *self, PyObject *nodeid) {
    uint64_t number = PyLong_AsUnsignedLongLong(nodeid);
    return PyErr_Occurred() ? NULL : object_of(node_of(&self->tables, number));
}

static PyObject *tables_show_top(TablesObject *self, PyObject *is_shown) {
    show_top(&self->tables, is_shown == Py_True);
    return none();
}

static PyObject *tables_find(TablesObject *self, PyObject *key) {
    Source source;
    return to_source(key, &source) ? object_of(find_node(&self->tables, &source)) : NULL;
}

static PyObject *tables_learn(TablesObject *self, PyObject *args) {
    const char *name;
    Source source;
    Stat st;
    Node *parent;
    if (!PyArg_ParseTuple(args, "O&O&O&y", to_source, &source, to_stat, &st, to_node, &parent, &name))
        return NULL;
    source.ino = st.ino, source.btime_ns = st.btime_ns;
    return object_of(learn_node(&self->tables, &source, S_ISDIR(st.mode), st.nlink > 1, parent, name));
}

static PyObject *tables_forget_name(TablesObject *self, PyObject *args) {
    Node *node, *parent;
    const char *name;
    if (!PyArg_ParseTuple(args, "O&O&y", to_node, &node, to_node, &parent, &name))
        return NULL;
    forget_name(&self->tables, node, parent, name);
    return none();
}

static PyObject *tables_move(TablesObject *self, PyObject *args) {
    const char *old, *new;
    Node *node, *old_parent, *new_parent;
    if (!PyArg_ParseTuple(args, "O&(O&y)(O&y)", to_node, &node, to_node, &old_parent, &old, to_node, &new_parent, &new))
        return NULL;
    move_node(&self->tables, node, old_parent, old, new_parent, new);
    return none();
}

static PyObject *tables_detach(TablesObject *self, PyObject *args) {
    Node *node;
    Stat st;
    if (!PyArg_ParseTuple(args, "O&O&", to_node, &node, to_stat, &st))
        return NULL;
    detach_node(&self->tables, node, &st);
    return none();
}

static PyObject *tables_set_kept_fd(TablesObject *Py_UNUSED(self), PyObject *args) {
    int number;
    Node *node;
    if (!PyArg_ParseTuple(args, "O&i", to_node, &node, &number))
        return NULL;
    node->kept_fd = number;
    return none();
}

static PyObject *tables_invalidate_all(TablesObject *self, PyObject *Py_UNUSED(nothing)) {
    invalidate_zone(&self->tables, OUTSIDE);
    return none();
}

/* Define a method whose only argument is a node, and the object that it returns. `t`: the tables. */
#define NODE_METHOD(name, returned)                                                                                    \
    static PyObject *tables_##name(TablesObject *self, PyObject *object) {                                             \
        Tables *t = &self->tables;                                                                                     \
        Node *node = node_from(object);                                                                                \
        (void)t;                                                                                                       \
        return node == NULL ? NULL : (returned);                                                                       \
    }
NODE_METHOD(change_begins, (change_begins(node), none()))
NODE_METHOD(change_ends, (change_ends(t, node), none()))
NODE_METHOD(directory_fd, fd_object(directory_fd(t, node)))
NODE_METHOD(drop_directory_fd, (drop_directory_fd(t, node), none()))
NODE_METHOD(drop_unused, PyBool_FromLong(drop_unused(t, node)))
NODE_METHOD(renumber, (renumber(t, node), PyBool_FromLong(!may_get_own_number(t, node))))
NODE_METHOD(zone_of, PyLong_FromLong(zone_of(t, node)))

/* Handles. */

static PyObject *tables_make_room(TablesObject *self, PyObject *uid) {
    unsigned long number = PyLong_AsUnsignedLong(uid);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(make_room(&self->tables, (uint32_t)number));
}

static PyObject *tables_add_to_share(TablesObject *self, PyObject *args) {
    unsigned uid;
    long long n;
    if (!PyArg_ParseTuple(args, "IL", &uid, &n))
        return NULL;
    add_to_share(&self->tables, uid, n);
    return none();
}

/* Return a handle by its number; NULL: an exception is set. */
static Handle *handle_from(TablesObject *self, PyObject *fh) {
    uint64_t number = PyLong_AsUnsignedLongLong(fh);
    Handle *handle = PyErr_Occurred() ? NULL : handle_of_number(&self->tables, number);
    if (handle == NULL && !PyErr_Occurred()) {
        errno = EBADF;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return handle;
}

static PyObject *tables_handle(TablesObject *self, PyObject *fh) {
    Handle *handle = handle_from(self, fh);
    if (handle == NULL)
        return NULL;
    PyObject *node = object_of(handle->node), *fd = fd_object(fd_take(handle->fd));
    if (node != NULL && fd != NULL)
        return Py_BuildValue("NN", node, fd);
    Py_XDECREF(node);
    Py_XDECREF(fd);
    return NULL;
}

static PyObject *tables_appends(TablesObject *self, PyObject *fh) {
    Handle *handle = handle_from(self, fh);
    return handle == NULL ? NULL : PyBool_FromLong(handle->appends);
}

static PyObject *tables_mark_not_executed(TablesObject *self, PyObject *fh) {
    Handle *handle = handle_from(self, fh);
    if (handle == NULL)
        PyErr_Clear(); /* a handle of a directory that was not opened */
    else
        handle->is_executed = false;
    return none();
}

static PyObject *tables_drop_backing(TablesObject *self, PyObject *Py_UNUSED(nothing)) {
    Tables *t = &self->tables;
    t->passes_through = false;
    for (uint32_t fh = 0; fh < t->n_slots; fh++)
        if (t->handles[fh] != NULL) {
            fd_put(t->handles[fh]->node->backing);
            t->handles[fh]->node->backing = NULL;
        }
    return none();
}

static PyObject *tables_close(TablesObject *self, PyObject *Py_UNUSED(nothing)) {
    close_tables(&self->tables);
    return none();
}

static PyObject *tables_set_blocking_names(TablesObject *self, PyObject *names) {
    char *bytes;
    Py_ssize_t n;
    if (PyBytes_AsStringAndSize(names, &bytes, &n) < 0)
        return NULL;
    Tables *t = &self->tables;
    free(t->blocking_names);
    t->blocking_names = memcpy(allocate(NULL, (size_t)n + 1), bytes, (size_t)n);
    return none();
}

static PyObject *tables_set_retrying(TablesObject *self, PyObject *args) {
    unsigned pid;
    int is_one;
    if (!PyArg_ParseTuple(args, "Ip", &pid, &is_one))
        return NULL;
    Tables *t = &self->tables;
    uint32_t at = 0;
    while (at < t->n_retrying && t->retrying_pids[at] != pid)
        at++;
    if (is_one && at == t->n_retrying && at < N_RETRIES_MAX)
        t->retrying_pids[t->n_retrying++] = pid;
    else if (!is_one && at < t->n_retrying)
        t->retrying_pids[at] = t->retrying_pids[--t->n_retrying];
    return none();
}

#define FIELD(name, type, is_read_only, text) {#name, type, offsetof(TablesObject, tables.name), is_read_only, text}

static PyMemberDef tables_members[] = {
    FIELD(n_zoned, T_ULONGLONG, READONLY, "Names that were checked to determine zones, since the start."),
    FIELD(n_directories, T_UINT, READONLY, "Directories with an fd, but for the root."),
    FIELD(n_handles, T_UINT, READONLY, "Handles with an fd."),
    FIELD(device, T_INT, 0, "/dev/fuse, which its owner closes; -1: not yet set."),
    FIELD(hides_root, T_BOOL, 0, "Whether no node has the nodeid ROOT."),
    FIELD(passes_through, T_BOOL, 0, "Whether files are passed through when opened, if possible."),
    FIELD(is_caching, T_BOOL, 0, "Whether entries of a slow filesystem are cached, or being fetched."),
    FIELD(is_case_sensitive, T_BOOL, 0, "Whether letter case matters in the root's filesystem, unless unknown."),
    FIELD(opens_directories, T_BOOL, 0, "Whether the kernel sends OPENDIR; else it opens directories itself."),
    FIELD(lists_with_attributes, T_BOOL, 0, "Whether every entry of a listing is sent with attributes."),
    FIELD(is_trash_renewed, T_BOOL, 0, "Whether no directory moved to TRASH has attributes with a long timeout that "
                                       "the kernel was sent before."),
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef tables_getset[] = {
    {"root", (getter)tables_root, NULL, "The root, which never ends.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define METHOD(name, arguments, text) {#name, (PyCFunction)tables_##name, arguments, text}

static PyMethodDef tables_methods[] = {
    METHOD(change_begins, METH_O, "A change of a node, or of a name in it, is under way."),
    METHOD(change_ends, METH_O, "The change has ended: attributes that were read of the node before are outdated."),
    METHOD(set_blocking_names, METH_O, "Names of mount points where a stat may block, each ended by a NUL."),
    METHOD(set_retrying, METH_VARARGS, "A client's thread was sent ESTALE just now; False: it retries no more."),
    METHOD(directory_fd, METH_O, "The O_PATH fd of a directory; None: it is not open."),
    METHOD(drop_directory_fd, METH_O, "Close the fd of a directory."),
    METHOD(set_kept_fd, METH_VARARGS, "A node is opened by this O_PATH fd, which stays the caller's; -1: by none."),
    METHOD(make_room, METH_O, "Make room for a user's handle, close directories. False: the user may have no more."),
    METHOD(add_to_share, METH_VARARGS, "Add n handles to a user's share; n may be negative."),
    METHOD(handle, METH_O, "The node and the fd of a handle."),
    METHOD(appends, METH_O, "Whether a handle was opened with O_APPEND."),
    METHOD(mark_not_executed, METH_O, "The process that ran a program by a handle has ended; RELEASE follows."),
    METHOD(drop_backing, METH_NOARGS, "Pass no file through any more: a dead mount would keep the files."),
    METHOD(close, METH_NOARGS, "Close all handles and directories."),
    METHOD(get, METH_O, "The node of a nodeid; None: there is none."),
    METHOD(show_top, METH_O, "Set whether the root's nodeid is TOP; ROOT is the root, too, unless `hides_root`."),
    METHOD(find, METH_O, "The live node of an incarnation; None: there is none."),
    METHOD(learn, METH_VARARGS, "The node of an inode that was stat'ed under a name; a new one is not counted yet."),
    METHOD(forget_name, METH_VARARGS, "Remove a name of a node."),
    METHOD(move, METH_VARARGS, "Replace a name of a node by another one."),
    METHOD(invalidate_all, METH_NOARGS, "Invalidate all directories whose attributes were sent with a long timeout."),
    METHOD(zone_of, METH_O, "Where a node lies: a NodeZone."),
    METHOD(renumber, METH_O, "Give a node its own number if that is free by now. Returns False: it soon may be."),
    METHOD(drop_unused, METH_O, "End a node that the kernel does not refer to; whether it has ended."),
    METHOD(detach, METH_VARARGS, "The last link of a closed node was removed: replies have its last attributes."),
    {NULL, NULL, 0, NULL},
};
static PyType_Slot tables_slots[] = {
    {Py_tp_doc, "The tables of a mount: its nodes, by nodeid and by source, and open handles and fds."},
    {Py_tp_new, tables_new},
    {Py_tp_dealloc, tables_dealloc},
    {Py_tp_iter, tables_iter},
    {Py_mp_length, tables_length},
    {Py_tp_members, tables_members},
    {Py_tp_getset, tables_getset},
    {Py_tp_methods, tables_methods},
    {0, NULL},
};
PyType_Spec tables_spec = TYPE("Tables", TablesObject, true, tables_slots);
