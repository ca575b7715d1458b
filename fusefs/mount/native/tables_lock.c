/* The lock around the tables: held between system calls, and by no thread during a call to the backing filesystem.
 *
 * Python threads hold it together with the interpreter's lock, which they release before they wait for this one.
 * Requests in the core hold it without the interpreter's lock, for a microsecond or two. */
#include "core.h"

enum { N_TRIES = 200 };

static inline void spin_pause(void) {
#if defined __x86_64__ || defined __i386__
    __builtin_ia32_pause();
#endif
}

void tables_lock(TablesMutex *lock) {
    /* Sleeping and waking would take longer than the lock is usually held. */
    for (int at = 0; at < N_TRIES; at++) {
        if (!pthread_mutex_trylock(&lock->mutex))
            return;
        spin_pause();
    }
    pthread_mutex_lock(&lock->mutex);
}

void tables_unlock(TablesMutex *lock) { pthread_mutex_unlock(&lock->mutex); }

/* Release the tables for calls to the backing filesystem. */
void calls_begin(Request *request) { tables_unlock(request->core->mutex); }

/* Take the tables again after the calls. */
void calls_end(Request *request) { tables_lock(request->core->mutex); }

/* Changes by other requests during a call. */

void change_begins(Node *node) { node->n_changing++; }

void change_ends(Tables *t, Node *node) {
    node->n_changing--;
    node->last_change = ++t->n_changes;
}

/* Return whether a node, or a name in it, has changed since `n_changes` had the value `since`. */
bool has_changed(const Node *node, uint64_t since) { return node->n_changing || node->last_change > since; }

/* Note a change of a node: nothing that was read about it before is still valid. */
void note_change(Request *request, Node *node) {
    /* its own changes do not count */
    request->n_changes_before = node->last_change = ++request->core->tables->n_changes;
}

/* Release the tables for calls that change names in one or two directories. */
void changes_begin(Request *request, Node *node, Node *other) {
    change_begins(node);
    change_begins(other);
    calls_begin(request);
}

/* Take the tables again after these calls. */
void changes_end(Request *request, Node *node, Node *other) {
    calls_end(request);
    node->n_changing--;
    other->n_changing--;
    note_change(request, node);
    note_change(request, other);
}

/* Return whether another request has changed a node, or a name in it, since this request began. */
bool is_changed(const Request *request, const Node *node) { return has_changed(node, request->n_changes_before); }

/* The Python type. */

/* Take the tables with the interpreter's lock, which is released while the thread waits. */
void wait_for_tables(TablesMutex *lock) {
    if (!pthread_mutex_trylock(&lock->mutex))
        return;
    PyThreadState *released = PyEval_SaveThread();
    tables_lock(lock);
    PyEval_RestoreThread(released);
}

static PyObject *lock_acquire(TablesMutex *self, PyObject *Py_UNUSED(nothing)) {
    wait_for_tables(self);
    holds_tables = true;
    Py_RETURN_NONE;
}

static PyObject *lock_release(TablesMutex *self, PyObject *Py_UNUSED(nothing)) {
    holds_tables = false;
    tables_unlock(self);
    Py_RETURN_NONE;
}

static PyObject *lock_is_held(TablesMutex *Py_UNUSED(self), void *Py_UNUSED(which)) {
    return PyBool_FromLong(holds_tables);
}

static PyObject *lock_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    if (!PyArg_ParseTuple(args, ""))
        return NULL;
    TablesMutex *self = (TablesMutex *)PyType_GenericAlloc(type, 0);
    if (self != NULL)
        pthread_mutex_init(&self->mutex, NULL);
    return (PyObject *)self;
}

static void lock_free(TablesMutex *self) {
    pthread_mutex_destroy(&self->mutex);
    free_object(self);
}

static PyMethodDef lock_methods[] = {
    {"acquire", (PyCFunction)lock_acquire, METH_NOARGS, "Take the lock."},
    {"release", (PyCFunction)lock_release, METH_NOARGS, "Release the lock."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef lock_getset[] = {
    {"is_held", (getter)lock_is_held, NULL, "Whether the calling thread holds the lock.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMemberDef lock_members[] = {
    {"is_slow", T_BOOL, offsetof(TablesMutex, is_slow), 0, "Whether the backing filesystem is slow."},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot lock_slots[] = {
    {Py_tp_doc, "The lock around the tables."}, {Py_tp_new, lock_new},       {Py_tp_dealloc, lock_free},
    {Py_tp_methods, lock_methods},              {Py_tp_getset, lock_getset}, {Py_tp_members, lock_members}, {0, NULL},
};
PyType_Spec tables_mutex_spec = TYPE("TablesMutex", TablesMutex, true, lock_slots);
