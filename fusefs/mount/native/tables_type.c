/* Tables for Python: a thin object over the C structure. To be used with the tables' lock. */
#include "core.h"

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *words[] = {"source", "seen", "root", "n_fds", "n_handles", "is_for_all", "is_shared", "racy_ns", NULL};
    PyObject *key, *attributes;
    int root_fd = -1, is_for_all = true, is_shared = false;
    unsigned n_fds = 0;
    long long n_handles = 0, racy_ns = 0;
    Source source;
    Seen seen;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO|$iILppL", words, &key, &attributes, &root_fd, &n_fds, &n_handles,
                                     &is_for_all, &is_shared, &racy_ns) ||
        source_from(key, &source) < 0 || seen_from(attributes, &seen) < 0)
        return NULL;
    source.ino = seen.ino, source.btime_ns = seen.btime_ns;
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

static void table_free(TablesObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    tables_free(&self->tables);
    close_fds();
    PyObject_Free(self);
    Py_DECREF(type);
}

static Py_ssize_t table_length(TablesObject *self) { return (Py_ssize_t)self->tables.n_nodes; }

static PyObject *table_root(TablesObject *self, void *Py_UNUSED(which)) { return object_of(self->tables.root); }

static PyObject *table_n_zoned(TablesObject *self, void *Py_UNUSED(which)) {
    return PyLong_FromUnsignedLongLong(self->tables.n_zoned);
}

static int by_age(const void *one, const void *other) {
    uint64_t number = (*(Node *const *)one)->number, than = (*(Node *const *)other)->number;
    return number < than ? -1 : number > than;
}

/* A list of the nodes for which a condition holds, in the order in which they were made. */
static PyObject *list_of(Tables *t, bool (*is_one)(const Node *)) {
    Node **nodes = allocate(NULL, t->n_nodes * sizeof *nodes);
    size_t n = 0;
    for (uint64_t at = 0; at < t->n_buckets; at++)
        for (Node *node = t->by_nodeid[at]; node != NULL; node = node->next_by_nodeid)
            if (is_one(node))
                nodes[n++] = node;
    qsort(nodes, n, sizeof *nodes, by_age);
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t at = 0; list != NULL && at < n; at++) {
        PyObject *object = object_of(nodes[at]);
        if (object == NULL || PyList_SetItem(list, (Py_ssize_t)at, object) < 0)
            Py_CLEAR(list);
    }
    free(nodes);
    return list;
}

static bool is_any(const Node *Py_UNUSED(node)) { return true; }
static bool is_lasting(const Node *node) { return node->is_lasting; }

static PyObject *table_lasting(TablesObject *self, PyObject *Py_UNUSED(nothing)) {
    return list_of(&self->tables, is_lasting);
}

static PyObject *table_iter(TablesObject *self) {
    PyObject *nodes = list_of(&self->tables, is_any);
    PyObject *found = nodes == NULL ? NULL : PyObject_GetIter(nodes);
    Py_XDECREF(nodes);
    return found;
}

static PyObject *table_get(TablesObject *self, PyObject *nodeid) {
    uint64_t number = PyLong_AsUnsignedLongLong(nodeid);
    return PyErr_Occurred() ? NULL : object_of(node_of(&self->tables, number));
}

static PyObject *table_put_top(TablesObject *self, PyObject *args, PyObject *keywords) {
    static char *words[] = {"is_shown", NULL};
    int is_shown;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "$p", words, &is_shown))
        return NULL;
    show_top(&self->tables, is_shown);
    Py_RETURN_NONE;
}

static PyObject *table_hide_root(TablesObject *self, PyObject *Py_UNUSED(nothing)) {
    self->tables.hides_root = true;
    Py_RETURN_NONE;
}

static PyObject *table_find(TablesObject *self, PyObject *key) {
    Source source;
    return source_from(key, &source) < 0 ? NULL : object_of(find_node(&self->tables, &source));
}

static PyObject *table_learn(TablesObject *self, PyObject *args) {
    PyObject *key, *attributes, *above;
    const char *name;
    Source source;
    Seen seen;
    Node *parent;
    if (!PyArg_ParseTuple(args, "OOOy", &key, &attributes, &above, &name) || source_from(key, &source) < 0 ||
        seen_from(attributes, &seen) < 0 || (parent = node_from(above)) == NULL)
        return NULL;
    source.ino = seen.ino, source.btime_ns = seen.btime_ns;
    return object_of(learn_node(&self->tables, &source, S_ISDIR(seen.mode), seen.nlink > 1, parent, name));
}

/* A node and a place. Returns 0, or -1 with an exception. */
static int name_from(PyObject *args, Node **node, Node **parent, const char **name) {
    PyObject *object, *above;
    if (!PyArg_ParseTuple(args, "OOy", &object, &above, name) || (*node = node_from(object)) == NULL ||
        (*parent = node_from(above)) == NULL)
        return -1;
    return 0;
}

static PyObject *table_take_away(TablesObject *self, PyObject *args) {
    Node *node, *parent;
    const char *name;
    if (name_from(args, &node, &parent, &name) < 0)
        return NULL;
    take_away_name(&self->tables, node, parent, name);
    Py_RETURN_NONE;
}

static PyObject *table_move(TablesObject *self, PyObject *args) {
    PyObject *object, *old_above, *new_above;
    const char *old, *new;
    Node *node, *old_parent, *new_parent;
    if (!PyArg_ParseTuple(args, "O(Oy)(Oy)", &object, &old_above, &old, &new_above, &new) ||
        (node = node_from(object)) == NULL || (old_parent = node_from(old_above)) == NULL ||
        (new_parent = node_from(new_above)) == NULL)
        return NULL;
    move_node(&self->tables, node, old_parent, old, new_parent, new);
    Py_RETURN_NONE;
}

static PyObject *table_zone_of(TablesObject *self, PyObject *object) {
    Node *node = node_from(object);
    return node == NULL ? NULL : PyLong_FromLong(zone_of(&self->tables, node));
}

static PyObject *table_lacks_its_number(TablesObject *self, PyObject *object) {
    Node *node = node_from(object);
    return node == NULL ? NULL : PyBool_FromLong(lacks_its_number(&self->tables, node));
}

static PyObject *table_renumber(TablesObject *self, PyObject *object) {
    Node *node = node_from(object);
    if (node == NULL)
        return NULL;
    renumber(&self->tables, node);
    Py_RETURN_NONE;
}

static PyObject *table_forget(TablesObject *self, PyObject *args) {
    PyObject *object;
    unsigned long long n;
    Node *node;
    if (!PyArg_ParseTuple(args, "OK", &object, &n) || (node = node_from(object)) == NULL)
        return NULL;
    return PyBool_FromLong(forget_node(&self->tables, node, n));
}

static PyObject *table_drop_unused(TablesObject *self, PyObject *object) {
    Node *node = node_from(object);
    return node == NULL ? NULL : PyBool_FromLong(drop_unused(&self->tables, node));
}

static PyObject *table_detach(TablesObject *self, PyObject *args) {
    PyObject *object, *attributes;
    Node *node;
    Seen seen;
    if (!PyArg_ParseTuple(args, "OO", &object, &attributes) || (node = node_from(object)) == NULL ||
        seen_from(attributes, &seen) < 0)
        return NULL;
    detach_node(&self->tables, node, &seen);
    Py_RETURN_NONE;
}

/* Directories' fds. */

static PyObject *table_directory_fd(TablesObject *self, PyObject *object) {
    Node *node = node_from(object);
    return node == NULL ? NULL : fd_object(directory_fd(&self->tables, node));
}

static PyObject *table_drop_directory_fd(TablesObject *self, PyObject *object) {
    Node *node = node_from(object);
    if (node == NULL)
        return NULL;
    drop_directory_fd(&self->tables, node);
    Py_RETURN_NONE;
}

static PyObject *table_keep_fd(TablesObject *Py_UNUSED(self), PyObject *args) {
    PyObject *object;
    int number;
    Node *node;
    if (!PyArg_ParseTuple(args, "Oi", &object, &number) || (node = node_from(object)) == NULL)
        return NULL;
    node->kept_fd = number;
    Py_RETURN_NONE;
}

/* Handles. */

static PyObject *table_make_room(TablesObject *self, PyObject *uid) {
    unsigned long number = PyLong_AsUnsignedLong(uid);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(make_room(&self->tables, (uint32_t)number));
}

static PyObject *table_may_open(TablesObject *self, PyObject *uid) {
    unsigned long number = PyLong_AsUnsignedLong(uid);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(may_open(&self->tables, (uint32_t)number));
}

static PyObject *table_add_to_share(TablesObject *self, PyObject *args) {
    unsigned uid;
    long long n;
    if (!PyArg_ParseTuple(args, "IL", &uid, &n))
        return NULL;
    add_to_share(&self->tables, uid, n);
    Py_RETURN_NONE;
}

static PyObject *table_open_handle(TablesObject *self, PyObject *args) {
    PyObject *object, *writer;
    int number, backing_id;
    unsigned uid, flags;
    Node *node;
    if (!PyArg_ParseTuple(args, "OiIIiO", &object, &number, &uid, &flags, &backing_id, &writer) ||
        (node = node_from(object)) == NULL)
        return NULL;
    long long owner = writer == Py_None ? -1 : PyLong_AsLongLong(writer);
    if (PyErr_Occurred())
        return NULL;
    Tables *t = &self->tables;
    open_handle(t, node, number, uid, flags, backing_id ? fd_new(-1, t->device, backing_id) : NULL, owner);
    Py_RETURN_NONE;
}

/* A handle by its number; NULL: an exception. */
static Handle *handle_from(TablesObject *self, PyObject *fh) {
    uint64_t number = PyLong_AsUnsignedLongLong(fh);
    Handle *handle = PyErr_Occurred() ? NULL : handle_of_number(&self->tables, number);
    if (handle == NULL && !PyErr_Occurred()) {
        errno = EBADF;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return handle;
}

static PyObject *table_handle(TablesObject *self, PyObject *fh) {
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

static PyObject *table_appends(TablesObject *self, PyObject *fh) {
    Handle *handle = handle_from(self, fh);
    return handle == NULL ? NULL : PyBool_FromLong(handle->appends);
}

static PyObject *table_runs_no_more(TablesObject *self, PyObject *fh) {
    Handle *handle = handle_from(self, fh);
    if (handle == NULL)
        PyErr_Clear(); /* of a directory that is not open */
    else
        handle->is_executed = false;
    Py_RETURN_NONE;
}

static PyObject *table_drop_backing(TablesObject *self, PyObject *Py_UNUSED(nothing)) {
    Tables *t = &self->tables;
    t->passes = false;
    for (uint32_t fh = 0; fh < t->n_slots; fh++)
        if (t->handles[fh] != NULL) {
            fd_put(t->handles[fh]->node->backing);
            t->handles[fh]->node->backing = NULL;
        }
    Py_RETURN_NONE;
}

static PyObject *table_close(TablesObject *self, PyObject *Py_UNUSED(nothing)) {
    close_tables(&self->tables);
    Py_RETURN_NONE;
}

enum { N_DIRECTORIES, N_HANDLES, N_PASSED };

static PyObject *table_count(TablesObject *self, void *which) {
    const Tables *t = &self->tables;
    int64_t n_passed = 0;
    for (uint32_t fh = 0; (intptr_t)which == N_PASSED && fh < t->n_slots; fh++)
        n_passed += t->handles[fh] != NULL && t->handles[fh]->is_passed && t->handles[fh]->next == NULL;
    const int64_t values[] = {t->n_directories, t->n_handles, n_passed};
    return PyLong_FromLongLong(values[(intptr_t)which]);
}

enum { DEVICE, PASSES, IS_CACHING, IS_CASE_SENSITIVE, IS_TRASH_RENEWED, OPENS_DIRECTORIES, LISTS_ALL };

static PyObject *table_setting(TablesObject *self, void *which) {
    const Tables *t = &self->tables;
    const int values[] = {t->device, t->passes, t->is_caching, t->is_case_sensitive,
                          t->is_trash_renewed, t->opens_directories, t->lists_all};
    return PyLong_FromLong(values[(intptr_t)which]);
}

static int table_set(TablesObject *self, PyObject *value, void *which) {
    Tables *t = &self->tables;
    long number = value == NULL ? 0 : PyLong_AsLong(value);
    if (PyErr_Occurred())
        return -1;
    bool *const flags[] = {NULL, &t->passes, &t->is_caching, &t->is_case_sensitive,
                           &t->is_trash_renewed, &t->opens_directories, &t->lists_all};
    if ((intptr_t)which == DEVICE)
        t->device = (int)number;
    else
        *flags[(intptr_t)which] = number;
    return 0;
}

static PyObject *table_n_changes(TablesObject *self, void *Py_UNUSED(which)) {
    return PyLong_FromUnsignedLongLong(self->tables.n_changes);
}

static PyObject *table_change_begins(TablesObject *Py_UNUSED(self), PyObject *object) {
    Node *node = node_from(object);
    if (node == NULL)
        return NULL;
    change_begins(node);
    Py_RETURN_NONE;
}

static PyObject *table_change_ends(TablesObject *self, PyObject *object) {
    Node *node = node_from(object);
    if (node == NULL)
        return NULL;
    change_ends(&self->tables, node);
    Py_RETURN_NONE;
}

static PyObject *table_wait_at(TablesObject *self, PyObject *names) {
    char *bytes;
    Py_ssize_t n;
    if (PyBytes_AsStringAndSize(names, &bytes, &n) < 0)
        return NULL;
    Tables *t = &self->tables;
    free(t->waiting);
    t->waiting = memcpy(allocate(NULL, (size_t)n + 1), bytes, (size_t)n);
    Py_RETURN_NONE;
}

static PyObject *table_retry(TablesObject *self, PyObject *args) {
    unsigned pid;
    int is_one;
    if (!PyArg_ParseTuple(args, "Ip", &pid, &is_one))
        return NULL;
    Tables *t = &self->tables;
    uint32_t at = 0;
    while (at < t->n_retries && t->retries[at] != pid)
        at++;
    if (is_one && at == t->n_retries && at < N_RETRIES_MAX)
        t->retries[t->n_retries++] = pid;
    else if (!is_one && at < t->n_retries)
        t->retries[at] = t->retries[--t->n_retries];
    Py_RETURN_NONE;
}

static PyGetSetDef table_getset[] = {
    {"root", (getter)table_root, NULL, "The root, which never ends.", NULL},
    {"n_zoned", (getter)table_n_zoned, NULL, "Names that were looked at to find where nodes lie, since the beginning.", NULL},
    {"n_directories", (getter)table_count, NULL, "Directories with an fd, but for the root.", (void *)N_DIRECTORIES},
    {"n_handles", (getter)table_count, NULL, "Handles with an fd.", (void *)N_HANDLES},
    {"n_passed", (getter)table_count, NULL, "Ids by which files are passed through.", (void *)N_PASSED},
    {"device", (getter)table_setting, (setter)table_set, "/dev/fuse, which stays its owner's; -1: not yet.", (void *)DEVICE},
    {"passes", (getter)table_setting, (setter)table_set, "Whether what is opened is passed through, if it can be.", (void *)PASSES},
    {"is_caching", (getter)table_setting, (setter)table_set, "Whether anything is cached of a slow filesystem, or being fetched.", (void *)IS_CACHING},
    {"is_case_sensitive", (getter)table_setting, (setter)table_set, "Whether letter case matters in the root's filesystem, as far as that is known.", (void *)IS_CASE_SENSITIVE},
    {"opens_directories", (getter)table_setting, (setter)table_set, "Whether the kernel has to ask for that: it does not do it itself.", (void *)OPENS_DIRECTORIES},
    {"lists_all", (getter)table_setting, (setter)table_set, "Whether no entry of a listing may be sent by its name alone.", (void *)LISTS_ALL},
    {"is_trash_renewed", (getter)table_setting, (setter)table_set, "Whether nothing lasts that the kernel was sent of directories before they were moved to where a reaper takes from.", (void *)IS_TRASH_RENEWED},
    {"n_changes", (getter)table_n_changes, NULL, "Changes of nodes and of names, since the beginning.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef table_methods[] = {
    {"change_begins", (PyCFunction)table_change_begins, METH_O, "A change of a node, or of a name in it, is under way."},
    {"change_ends", (PyCFunction)table_change_ends, METH_O, "It is made: what was seen of the node before is not to be believed."},
    {"wait_at", (PyCFunction)table_wait_at, METH_O, "Names of mount points where a look may have to wait, each ended by a NUL."},
    {"retry", (PyCFunction)table_retry, METH_VARARGS, "A thread of a client's was sent ESTALE just now, or no more."},
    {"directory_fd", (PyCFunction)table_directory_fd, METH_O, "The O_PATH fd of a directory; None: it is not open."},
    {"drop_directory_fd", (PyCFunction)table_drop_directory_fd, METH_O, "A directory is not to be held open."},
    {"keep_fd", (PyCFunction)table_keep_fd, METH_VARARGS, "A node is reached by an O_PATH fd, which stays the caller's; -1: it is not any more."},
    {"make_room", (PyCFunction)table_make_room, METH_O, "Before a handle of a user's: directories give way; False: the user has their share."},
    {"may_open", (PyCFunction)table_may_open, METH_O, "Whether a user may have one more handle."},
    {"add_to_share", (PyCFunction)table_add_to_share, METH_VARARGS, "A user has so many more handles, or fewer."},
    {"open_handle", (PyCFunction)table_open_handle, METH_VARARGS, "A handle of a node by an fd, which is the tables' from now on, opened by a uid, with flags. Of the first one: its backing id or 0, and whom it is written as."},
    {"handle", (PyCFunction)table_handle, METH_O, "The node and the fd of a handle."},
    {"appends", (PyCFunction)table_appends, METH_O, "Whether a handle was opened with O_APPEND."},
    {"runs_no_more", (PyCFunction)table_runs_no_more, METH_O, "The process that ran a program by a handle has ended; the handle goes, too, perhaps later."},
    {"drop_backing", (PyCFunction)table_drop_backing, METH_NOARGS, "Pass nothing through any more: the kernel would keep the files as long as a dead mount stays."},
    {"close", (PyCFunction)table_close, METH_NOARGS, "Close all."},
    {"get", (PyCFunction)table_get, METH_O, "The node that the kernel means by a nodeid; None: there is none."},
    {"put_top", (PyCFunction)(void (*)(void))table_put_top, METH_VARARGS | METH_KEYWORDS, "Whether clients know the root by TOP; it is found by ROOT all the same, until `hide_root`."},
    {"hide_root", (PyCFunction)table_hide_root, METH_NOARGS, "From now on no node is ROOT."},
    {"find", (PyCFunction)table_find, METH_O, "The live node of an incarnation; None: there is none."},
    {"learn", (PyCFunction)table_learn, METH_VARARGS, "The node of what was just seen under a name, a new one if need be; not counted yet."},
    {"take_away", (PyCFunction)table_take_away, METH_VARARGS, "A node has not this name any more."},
    {"move", (PyCFunction)table_move, METH_VARARGS, "A node has another name instead of one."},
    {"lasting", (PyCFunction)table_lasting, METH_NOARGS, "The directories of which the kernel was sent attributes that it believes for long."},
    {"zone_of", (PyCFunction)table_zone_of, METH_O, "Where a node lies: a NodeZone."},
    {"lacks_its_number", (PyCFunction)table_lacks_its_number, METH_O, "Whether a node has a private number only because the kernel had not yet let go of what had its own before."},
    {"renumber", (PyCFunction)table_renumber, METH_O, "Give a node its own number after all, if that is free by now."},
    {"forget", (PyCFunction)table_forget, METH_VARARGS, "The kernel lets go of n references; whether the node has ended."},
    {"drop_unused", (PyCFunction)table_drop_unused, METH_O, "End a node that the kernel does not refer to; whether it has ended."},
    {"detach", (PyCFunction)table_detach, METH_VARARGS, "Its last link went, and it is not open: a request for it is answered with what it was."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot table_slots[] = {
    {Py_tp_doc, "What a mount knows: its nodes, by nodeid and by what they are incarnations of, and what is open."},
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_free},
    {Py_tp_iter, table_iter},
    {Py_mp_length, table_length},
    {Py_tp_getset, table_getset},
    {Py_tp_methods, table_methods},
    {0, NULL},
};
static PyType_Spec table_spec = {
    .name = "fusefs.mount.native._core.Tables",
    .basicsize = sizeof(TablesObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = table_slots,
};

static PyObject *close_unused(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing)) {
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
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(most_of_one(number));
}

static PyMethodDef functions[] = {
    {"most_of_one", most_of, METH_O, "How many handles of some number a lone user gets who is not root."},
    {"close_unused", close_unused, METH_NOARGS, "End the uses of fds by this thread's operation, and close those that nobody uses; without the tables' lock."},
    {NULL, NULL, 0, NULL},
};

/* Returns 0, or -1 with an exception. */
int add_tables(PyObject *module) {
    if (add_node_types(module) < 0 || PyModule_AddFunctions(module, functions) < 0)
        return -1;
    PyObject *type = PyType_FromSpec(&table_spec);
    int error = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return error;
}
