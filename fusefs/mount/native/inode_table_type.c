/* Node and InodeTable for Python: thin objects over the C structures.
 *
 * A Node object is made when Python asks for it, and is the same for as long as Python has it. Both are used with the
 * tables' lock; the last use of a Node object may go without. */
#include "core.h"

static PyTypeObject *node_type;
static PyObject *attributes_type;

typedef struct {
    PyObject_HEAD
    Node *node; /* one use */
} NodeObject;

/* A new reference to what Python has of a node; None for NULL. */
PyObject *object_of(Node *node) {
    if (node == NULL)
        Py_RETURN_NONE;
    if (node->object != NULL)
        return Py_NewRef(node->object);
    NodeObject *self = (NodeObject *)PyType_GenericAlloc(node_type, 0);
    if (self == NULL)
        return NULL;
    self->node = node_take(node);
    node->object = (PyObject *)self;
    return node->object;
}

static void node_free(NodeObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    self->node->object = NULL;
    node_put(self->node);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* The node of an object; NULL: an exception. */
Node *node_from(PyObject *object) {
    if (!PyObject_TypeCheck(object, node_type)) {
        PyErr_SetString(PyExc_TypeError, "not a Node");
        return NULL;
    }
    return ((NodeObject *)object)->node;
}

/* Values. */

PyObject *source_object(const Source *source) {
    if (source->n_handle)
        return Py_BuildValue("Ky#", (unsigned long long)source->dev, source->handle, (Py_ssize_t)source->n_handle);
    return Py_BuildValue("KKL", (unsigned long long)source->dev, (unsigned long long)source->ino,
                         (long long)source->btime_ns);
}

static PyObject *in_ns(int64_t seconds, uint32_t ns) {
    return PyLong_FromLongLong(seconds * 1000000000ll + ns);
}

PyObject *attributes_object(const Seen *seen) {
    PyObject *fields = PyTuple_New(14), *made = NULL;
    if (fields == NULL)
        return NULL;
    const uint64_t numbers[] = {seen->dev, seen->ino,  seen->mode, seen->nlink,  seen->uid,
                                seen->gid, seen->rdev, seen->size, seen->blocks, seen->blksize};
    for (int at = 0; at < 10; at++)
        PyTuple_SetItem(fields, at, PyLong_FromUnsignedLongLong(numbers[at]));
    PyTuple_SetItem(fields, 10, in_ns(seen->atime_s, seen->atime_ns));
    PyTuple_SetItem(fields, 11, in_ns(seen->mtime_s, seen->mtime_ns));
    PyTuple_SetItem(fields, 12, in_ns(seen->ctime_s, seen->ctime_ns));
    PyTuple_SetItem(fields, 13, PyLong_FromLongLong(seen->btime_ns));
    PyObject *arguments = PyErr_Occurred() ? NULL : PyTuple_Pack(1, fields);
    if (arguments != NULL) {
        newfunc new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
        made = new_tuple((PyTypeObject *)attributes_type, arguments, NULL);
        Py_DECREF(arguments);
    }
    Py_DECREF(fields);
    return made;
}

/* What Attributes say. Returns 0, or -1 with an exception. */
static int seen_from(PyObject *attributes, Seen *seen) {
    int64_t values[14];
    if (!PyTuple_Check(attributes) || PyTuple_Size(attributes) != 14) {
        PyErr_SetString(PyExc_TypeError, "not Attributes");
        return -1;
    }
    for (int at = 0; at < 14; at++)
        values[at] = at < 10 ? (int64_t)PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(attributes, at))
                             : PyLong_AsLongLong(PyTuple_GetItem(attributes, at));
    memset(seen, 0, sizeof *seen);
    seen->dev = (uint64_t)values[0], seen->ino = (uint64_t)values[1], seen->mode = (uint32_t)values[2];
    seen->nlink = (uint32_t)values[3], seen->uid = (uint32_t)values[4], seen->gid = (uint32_t)values[5];
    seen->rdev = (uint64_t)values[6], seen->size = (uint64_t)values[7], seen->blocks = (uint64_t)values[8];
    seen->blksize = (uint32_t)values[9];
    int64_t *const seconds[] = {&seen->atime_s, &seen->mtime_s, &seen->ctime_s};
    uint32_t *const ns[] = {&seen->atime_ns, &seen->mtime_ns, &seen->ctime_ns};
    for (int at = 0; at < 3; at++) {
        int64_t rest = values[10 + at] % 1000000000;
        rest += rest < 0 ? 1000000000 : 0;
        *seconds[at] = (values[10 + at] - rest) / 1000000000, *ns[at] = (uint32_t)rest;
    }
    seen->btime_ns = values[13];
    return PyErr_Occurred() ? -1 : 0;
}

/* Which incarnation a SourceKey means; the bytes stay the object's. Returns 0, or -1 with an exception. */
static int source_from(PyObject *key, Source *source) {
    Py_ssize_t n = PyTuple_Check(key) ? PyTuple_Size(key) : 0;
    *source = (Source){0};
    if (n != 2 && n != 3) {
        PyErr_SetString(PyExc_TypeError, "not a SourceKey");
        return -1;
    }
    source->dev = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(key, 0));
    if (n == 2) {
        char *bytes;
        Py_ssize_t n_bytes;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(key, 1), &bytes, &n_bytes) < 0)
            return -1;
        source->handle = bytes, source->n_handle = (uint32_t)n_bytes;
    } else {
        source->ino = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(key, 1));
        source->btime_ns = PyLong_AsLongLong(PyTuple_GetItem(key, 2));
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Node. */

enum { NODEID, DEV, INO, NLOOKUP, N_OPEN };

static PyObject *get_number(NodeObject *self, void *which) {
    const Node *node = self->node;
    const uint64_t values[] = {node->nodeid, node->dev, node->ino, node->nlookup, node->n_open};
    return PyLong_FromUnsignedLongLong(values[(intptr_t)which]);
}

static int set_count(NodeObject *self, PyObject *value, void *which) {
    unsigned long long number = value == NULL ? 0 : PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred())
        return -1;
    if ((intptr_t)which == NLOOKUP)
        self->node->nlookup = number;
    else
        self->node->n_open = (uint32_t)number;
    return 0;
}

enum { IS_DIRECTORY, IS_TOLD, IS_LASTING };

static bool *flag_of(Node *node, intptr_t which) {
    return which == IS_TOLD ? &node->is_told : which == IS_LASTING ? &node->is_lasting : &node->is_directory;
}

static PyObject *get_flag(NodeObject *self, void *which) {
    return PyBool_FromLong(*flag_of(self->node, (intptr_t)which));
}

static int set_flag(NodeObject *self, PyObject *value, void *which) {
    int is_it = value == NULL ? 0 : PyObject_IsTrue(value);
    *flag_of(self->node, (intptr_t)which) = is_it > 0;
    return is_it < 0 ? -1 : 0;
}

static PyObject *get_btime(NodeObject *self, void *Py_UNUSED(which)) {
    return PyLong_FromLongLong(self->node->btime_ns);
}

enum { TOLD_UNTIL, CHANGED };

static PyObject *get_time(NodeObject *self, void *which) {
    return PyFloat_FromDouble((intptr_t)which == CHANGED ? self->node->changed_s : self->node->told_until_s);
}

static int set_time(NodeObject *self, PyObject *value, void *which) {
    double time_s = value == NULL ? 0 : PyFloat_AsDouble(value);
    if (PyErr_Occurred())
        return -1;
    *((intptr_t)which == CHANGED ? &self->node->changed_s : &self->node->told_until_s) = time_s;
    return 0;
}

static PyObject *get_pages(NodeObject *self, void *Py_UNUSED(which)) {
    const Node *node = self->node;
    if (node->page_size < 0)
        Py_RETURN_NONE;
    return Py_BuildValue("LLL", (long long)node->page_mtime_ns, (long long)node->page_ctime_ns,
                         (long long)node->page_size);
}

static int set_pages(NodeObject *self, PyObject *value, void *Py_UNUSED(which)) {
    long long mtime_ns = 0, ctime_ns = 0, size = -1;
    if (value != NULL && value != Py_None && !PyArg_ParseTuple(value, "LLL", &mtime_ns, &ctime_ns, &size))
        return -1;
    self->node->page_mtime_ns = mtime_ns, self->node->page_ctime_ns = ctime_ns, self->node->page_size = size;
    return 0;
}

static PyObject *get_source(NodeObject *self, void *Py_UNUSED(which)) {
    Source source = source_of_node(self->node);
    return source_object(&source);
}

static PyObject *get_parent(NodeObject *self, void *Py_UNUSED(which)) { return object_of(self->node->at.parent); }

static PyObject *get_name(NodeObject *self, void *Py_UNUSED(which)) {
    return PyBytes_FromString(self->node->at.name == NULL ? "" : self->node->at.name);
}

static PyObject *get_last(NodeObject *self, void *Py_UNUSED(which)) {
    if (self->node->last == NULL)
        Py_RETURN_NONE;
    return attributes_object(self->node->last);
}

static PyObject *node_is_seen_in(NodeObject *self, PyObject *attributes) {
    Seen seen;
    if (seen_from(attributes, &seen) < 0)
        return NULL;
    const Node *node = self->node;
    return PyBool_FromLong(seen.ino == node->ino && seen.btime_ns == node->btime_ns && seen.dev == node->dev);
}

static PyObject *place_object(const NodeName *at) {
    PyObject *parent = object_of(at->parent);
    return parent == NULL ? NULL : Py_BuildValue("Ny", parent, at->name);
}

static PyObject *node_places(NodeObject *self, PyObject *Py_UNUSED(nothing)) {
    const Node *node = self->node;
    PyObject *places = PyList_New(0);
    for (int at = -1; places != NULL && at < (node->others == NULL ? 0 : N_OTHERS_MAX); at++) {
        const NodeName *name = at < 0 ? &node->at : &node->others[at];
        PyObject *place = name->parent == NULL ? NULL : place_object(name);
        if (PyErr_Occurred() || (place != NULL && PyList_Append(places, place) < 0))
            Py_CLEAR(places);
        Py_XDECREF(place);
    }
    PyObject *found = places == NULL ? NULL : PyObject_GetIter(places);
    Py_XDECREF(places);
    return found;
}

static PyObject *node_opened(NodeObject *self, PyObject *Py_UNUSED(nothing)) {
    free(self->node->last);
    self->node->last = NULL;
    Py_RETURN_NONE;
}

static PyGetSetDef node_getset[] = {
    {"nodeid", (getter)get_number, NULL, "The number that the kernel knows it by.", (void *)NODEID},
    {"dev", (getter)get_number, NULL, "Its device.", (void *)DEV},
    {"ino", (getter)get_number, NULL, "Its inode number.", (void *)INO},
    {"btime_ns", (getter)get_btime, NULL, "Its birth time; 0: unknown.", NULL},
    {"nlookup", (getter)get_number, (setter)set_count, "References that the kernel holds.", (void *)NLOOKUP},
    {"n_open", (getter)get_number, (setter)set_count, "Open handles.", (void *)N_OPEN},
    {"is_directory", (getter)get_flag, NULL, "Whether it is a directory.", (void *)IS_DIRECTORY},
    {"is_told", (getter)get_flag, (setter)set_flag, "Whether the kernel was sent its attributes since they were made void: the reply may still be on its way.", (void *)IS_TOLD},
    {"is_lasting", (getter)get_flag, (setter)set_flag, "Whether the kernel was sent attributes of this directory that it believes for long.", (void *)IS_LASTING},
    {"told_until_s", (getter)get_time, (setter)set_time, "Until when the kernel may believe its name and attributes; 0: unknown, or not at all.", (void *)TOLD_UNTIL},
    {"changed_s", (getter)get_time, (setter)set_time, "When a name in it was changed; 0: never.", (void *)CHANGED},
    {"pages", (getter)get_pages, (setter)set_pages, "Its times of modification and change and its size when it was opened last; None: unknown.", NULL},
    {"source", (getter)get_source, NULL, "Which incarnation it is: a SourceKey.", NULL},
    {"parent", (getter)get_parent, NULL, "The directory where it was found last; None: no name is known.", NULL},
    {"name", (getter)get_name, NULL, "Its name there.", NULL},
    {"last", (getter)get_last, NULL, "Its attributes when its last link went and it was not open; else None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef node_methods[] = {
    {"is_seen_in", (PyCFunction)node_is_seen_in, METH_O, "Whether attributes can be this incarnation's: same inode number, born at the same time."},
    {"places", (PyCFunction)node_places, METH_NOARGS, "Where it may be found, the likeliest first."},
    {"opened", (PyCFunction)node_opened, METH_NOARGS, "It is open, even if its last link went while it was being opened."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot node_slots[] = {
    {Py_tp_doc, "One incarnation of one inode."},
    {Py_tp_dealloc, node_free},
    {Py_tp_getset, node_getset},
    {Py_tp_methods, node_methods},
    {0, NULL},
};
PyType_Spec node_spec = {
    .name = "fusefs.mount.native._core.Node",
    .basicsize = sizeof(NodeObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = node_slots,
};

/* InodeTable. */

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *key, *attributes;
    Source source;
    Seen seen;
    if (!PyArg_ParseTuple(args, "OO", &key, &attributes) || source_from(key, &source) < 0 ||
        seen_from(attributes, &seen) < 0)
        return NULL;
    source.ino = seen.ino, source.btime_ns = seen.btime_ns;
    InodeTable *self = (InodeTable *)PyType_GenericAlloc(type, 0);
    if (self != NULL)
        tables_make(&self->tables, &source);
    return (PyObject *)self;
}

static void table_free(InodeTable *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    tables_free(&self->tables);
    PyObject_Free(self);
    Py_DECREF(type);
}

static Py_ssize_t table_length(InodeTable *self) { return (Py_ssize_t)self->tables.n_nodes; }

static PyObject *table_root(InodeTable *self, void *Py_UNUSED(which)) { return object_of(self->tables.root); }

static PyObject *table_n_zoned(InodeTable *self, void *Py_UNUSED(which)) {
    return PyLong_FromUnsignedLongLong(self->tables.n_zoned);
}

/* A list of the nodes for which a condition holds. */
static PyObject *list_of(Tables *t, bool (*is_one)(Tables *, Node *)) {
    PyObject *nodes = PyList_New(0);
    for (uint64_t at = 0; nodes != NULL && at < t->n_buckets; at++)
        for (Node *node = t->by_nodeid[at]; nodes != NULL && node != NULL; node = node->next_by_nodeid) {
            PyObject *object = is_one(t, node) ? object_of(node) : NULL;
            if (PyErr_Occurred() || (object != NULL && PyList_Append(nodes, object) < 0))
                Py_CLEAR(nodes);
            Py_XDECREF(object);
        }
    return nodes;
}

static bool is_any(Tables *Py_UNUSED(t), Node *Py_UNUSED(node)) { return true; }
static bool is_lasting(Tables *Py_UNUSED(t), Node *node) { return node->is_lasting; }

static PyObject *table_lasting(InodeTable *self, PyObject *Py_UNUSED(nothing)) {
    return list_of(&self->tables, is_lasting);
}

static PyObject *table_iter(InodeTable *self) {
    PyObject *nodes = list_of(&self->tables, is_any);
    PyObject *found = nodes == NULL ? NULL : PyObject_GetIter(nodes);
    Py_XDECREF(nodes);
    return found;
}

static PyObject *table_get(InodeTable *self, PyObject *nodeid) {
    uint64_t number = PyLong_AsUnsignedLongLong(nodeid);
    return PyErr_Occurred() ? NULL : object_of(node_of(&self->tables, number));
}

static PyObject *table_put_top(InodeTable *self, PyObject *args, PyObject *keywords) {
    static char *words[] = {"is_shown", NULL};
    int is_shown;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "$p", words, &is_shown))
        return NULL;
    show_top(&self->tables, is_shown);
    Py_RETURN_NONE;
}

static PyObject *table_hide_root(InodeTable *self, PyObject *Py_UNUSED(nothing)) {
    self->tables.hides_root = true;
    Py_RETURN_NONE;
}

static PyObject *table_find(InodeTable *self, PyObject *key) {
    Source source;
    return source_from(key, &source) < 0 ? NULL : object_of(find_node(&self->tables, &source));
}

static PyObject *table_learn(InodeTable *self, PyObject *args) {
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

static PyObject *table_take_away(InodeTable *self, PyObject *args) {
    Node *node, *parent;
    const char *name;
    if (name_from(args, &node, &parent, &name) < 0)
        return NULL;
    take_away_name(&self->tables, node, parent, name);
    Py_RETURN_NONE;
}

static PyObject *table_move(InodeTable *self, PyObject *args) {
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

static PyObject *table_zone_of(InodeTable *self, PyObject *object) {
    Node *node = node_from(object);
    return node == NULL ? NULL : PyLong_FromLong(zone_of(&self->tables, node));
}

static PyObject *table_lacks_its_number(InodeTable *self, PyObject *object) {
    Node *node = node_from(object);
    return node == NULL ? NULL : PyBool_FromLong(lacks_its_number(&self->tables, node));
}

static PyObject *table_renumber(InodeTable *self, PyObject *object) {
    Node *node = node_from(object);
    if (node == NULL)
        return NULL;
    renumber(&self->tables, node);
    Py_RETURN_NONE;
}

static PyObject *table_forget(InodeTable *self, PyObject *args) {
    PyObject *object;
    unsigned long long n;
    Node *node;
    if (!PyArg_ParseTuple(args, "OK", &object, &n) || (node = node_from(object)) == NULL)
        return NULL;
    return PyBool_FromLong(forget_node(&self->tables, node, n));
}

static PyObject *table_drop_unused(InodeTable *self, PyObject *object) {
    Node *node = node_from(object);
    return node == NULL ? NULL : PyBool_FromLong(drop_unused(&self->tables, node));
}

static PyObject *table_detach(InodeTable *self, PyObject *args) {
    PyObject *object, *attributes;
    Node *node;
    Seen seen;
    if (!PyArg_ParseTuple(args, "OO", &object, &attributes) || (node = node_from(object)) == NULL ||
        seen_from(attributes, &seen) < 0)
        return NULL;
    detach_node(&self->tables, node, &seen);
    Py_RETURN_NONE;
}

static PyGetSetDef table_getset[] = {
    {"root", (getter)table_root, NULL, "The root, which never ends.", NULL},
    {"n_zoned", (getter)table_n_zoned, NULL, "Names that were looked at to find where nodes lie, since the beginning.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef table_methods[] = {
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
    {Py_tp_doc, "All nodes of a mount, by nodeid and by what they are incarnations of."},
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_free},
    {Py_tp_iter, table_iter},
    {Py_mp_length, table_length},
    {Py_tp_getset, table_getset},
    {Py_tp_methods, table_methods},
    {0, NULL},
};
static PyType_Spec table_spec = {
    .name = "fusefs.mount.native._core.InodeTable",
    .basicsize = sizeof(InodeTable),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = table_slots,
};

/* Returns 0, or -1 with an exception. */
int add_inode_table(PyObject *module) {
    PyObject *values = PyImport_ImportModule("fusefs.core.inode_attributes");
    attributes_type = values == NULL ? NULL : PyObject_GetAttrString(values, "Attributes");
    Py_XDECREF(values);
    node_type = attributes_type == NULL ? NULL : (PyTypeObject *)PyType_FromSpec(&node_spec);
    PyObject *table = node_type == NULL ? NULL : PyType_FromSpec(&table_spec);
    int error = table == NULL || PyModule_AddType(module, node_type) < 0 ||
                        PyModule_AddType(module, (PyTypeObject *)table) < 0
                    ? -1
                    : 0;
    Py_XDECREF(table);
    return error;
}
