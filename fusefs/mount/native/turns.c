/* Who has the tables: a turn of Python's whole, or requests of the core, which share them.
 *
 * Those have them to themselves only between their calls to the backing filesystem (the section), and not while a
 * turn of Python's has begun and not ended. What others of the core may have changed during a call is what the kernel
 * lets happen at a time, which is little: it holds the lock of a directory until a change in it is answered. The rest is
 * found by `is_changed`. */
#include "core.h"

enum { PATIENCE_NS = 100000, REST_NS = 10000000 };

/* Turns of Python's: a lock that any thread may release. They go first, or they would never have it. */

static PyObject *lock_acquire(TurnsLock *lock, PyObject *Py_UNUSED(nothing)) {
    pthread_mutex_lock(&lock->mutex); /* nobody who has it waits for the interpreter's */
    bool is_free = !lock->is_taken && !lock->n_sharing;
    if (is_free)
        lock->is_taken = true;
    else
        lock->n_waiting++;
    pthread_mutex_unlock(&lock->mutex);
    holds_tables = true;
    if (is_free)
        Py_RETURN_NONE;
    PyThreadState *released = PyEval_SaveThread();
    pthread_mutex_lock(&lock->mutex);
    while (lock->is_taken || lock->n_sharing)
        pthread_cond_wait(&lock->is_free, &lock->mutex);
    lock->is_taken = true;
    lock->n_waiting--;
    pthread_mutex_unlock(&lock->mutex);
    PyEval_RestoreThread(released);
    Py_RETURN_NONE;
}

static PyObject *lock_release(TurnsLock *lock, PyObject *Py_UNUSED(nothing)) {
    pthread_mutex_lock(&lock->mutex);
    lock->is_taken = holds_tables = false;
    pthread_cond_broadcast(&lock->is_free);
    pthread_mutex_unlock(&lock->mutex);
    Py_RETURN_NONE;
}

/* Requests of the core. All without the interpreter's lock, but for `share_no_more`. */

static void share(TurnsLock *lock) {
    pthread_mutex_lock(&lock->mutex);
    while (lock->is_taken || lock->n_waiting)
        pthread_cond_wait(&lock->is_free, &lock->mutex);
    lock->n_sharing++;
    pthread_mutex_unlock(&lock->mutex);
}

static void share_no_more(TurnsLock *lock) {
    pthread_mutex_lock(&lock->mutex);
    if (!--lock->n_sharing && lock->n_waiting)
        pthread_cond_broadcast(&lock->is_free);
    pthread_mutex_unlock(&lock->mutex);
}

static PyObject *lock_unshare(TurnsLock *lock, PyObject *Py_UNUSED(nothing)) {
    share_no_more(lock);
    Py_RETURN_NONE;
}

/* It is waited for awake, for as long as it may take if nothing hangs: to be woken for it takes longer, and keeps who
 * has it from its next request. */
static void section_begin(Worker *worker) {
    TurnsLock *lock = worker->core->turns_lock;
    int own = worker->core_number;
    uint64_t begun_ns = 0;
    while (pthread_mutex_trylock(&lock->section)) {
        uint64_t at_ns = now_ns();
        if (at_ns <= worker->patient_from_ns || (own && __atomic_load_n(&lock->section_of, __ATOMIC_RELAXED) == own)) {
            pthread_mutex_lock(&lock->section);
            break;
        }
        if (!begun_ns)
            begun_ns = at_ns;
        else if (at_ns - begun_ns > PATIENCE_NS)
            worker->patient_from_ns = at_ns + REST_NS;
    }
    __atomic_store_n(&lock->section_of, own, __ATOMIC_RELAXED);
}

static void section_end(Worker *worker) { pthread_mutex_unlock(&worker->core->turns_lock->section); }

/* Have the tables with others of the core. Without the interpreter's lock. */
void tables_begin(Worker *worker) {
    share(worker->core->turns_lock);
    section_begin(worker);
    worker->has_tables = true;
}

/* Have them no more, if it has them. */
void tables_end(Worker *worker) {
    if (!worker->has_tables)
        return;
    worker->has_tables = false;
    section_end(worker);
    share_no_more(worker->core->turns_lock);
}

/* Add to a number of an object's. Returns 0, or -1 with an exception. */
static int add_to(PyObject *object, PyObject *name, int64_t more) {
    uint64_t value;
    if (number_of(object, name, &value) < 0)
        return -1;
    PyObject *sum = PyLong_FromLongLong((int64_t)value + more);
    int error = sum == NULL ? -1 : PyObject_SetAttr(object, name, sum);
    Py_XDECREF(sum);
    return error;
}

/* A request begins. Returns 0, or -1 with an exception. */
int turn_begin(Request *request) {
    Worker *worker = request->worker;
    Core *core = worker->core;
    request->n_changes_before = core->tables->n_changes;
    if (PyObject_SetAttr(core->lock, names.turn, worker->turn) < 0 ||
        PyObject_SetAttr(worker->turn, names.was_away, Py_False) < 0)
        return -1;
    return is_empty(core->lock, names._away) ? 0 : add_to(core->lock, names._n_begun, 1); /* for whom they were taken from */
}

/* Note a call, so that it is seen when it takes long, and wake who looks for such. Returns 0, or -1. */
static int note_call(Request *request) {
    Core *core = request->core;
    PyObject *calls = request->worker->calls, *call = PyLong_FromUnsignedLongLong(request->unique), *wakes;
    int error = call == NULL ? -1 : PyList_Append(calls, call);
    Py_XDECREF(call);
    if (error || PyObject_SetAttr(core->lock, names.is_used, Py_True) < 0)
        return -1;
    if (!is_true(core->lock, names.rests))
        return 0;
    wakes = PyObject_GetAttr(core->lock, names.wakes);
    if (wakes == NULL || PyObject_SetAttr(core->lock, names.rests, Py_False) < 0)
        error = -1;
    else
        error = is_so(PyObject_CallMethodObjArgs(wakes, names.set, NULL)) < 0 ? -1 : 0;
    Py_XDECREF(wakes);
    return error;
}

/* Calls to the backing filesystem follow, during which others of the core have the tables, and a turn of Python's if
 * they take long. Returns 0, or -1. */
int calls_begin(Request *request) {
    Worker *worker = request->worker;
    request->is_noted = is_true(worker->core->lock, names.is_watched); /* from some moment on it is */
    if (request->is_noted && note_call(request) < 0)
        return -1;
    request->released = PyEval_SaveThread();
    section_end(worker);
    return 0;
}

/* They are done, and we have the tables again. Returns 0, or -1. */
int calls_end(Request *request) {
    Worker *worker = request->worker;
    Core *core = worker->core;
    section_begin(worker);
    PyEval_RestoreThread(request->released);
    if (request->is_noted) {
        Py_ssize_t n = PyList_Size(worker->calls);
        if (n > 0 && PyList_SetSlice(worker->calls, n - 1, n, NULL) < 0)
            return -1;
        if (n <= 0) { /* it was let go of for us */
            PyThreadState *released = PyEval_SaveThread();
            section_end(worker);
            tables_begin(worker);
            PyEval_RestoreThread(released);
            PyObject *nothing = PyObject_CallMethodObjArgs(core->lock, names.returned, worker->turn, NULL);
            if (nothing == NULL)
                return -1;
            Py_DECREF(nothing);
            worker->was_taken = true;
            request->was_away |= is_true(worker->turn, names.was_away);
            return 0;
        }
    }
    return PyObject_SetAttr(core->lock, names.turn, worker->turn);
}

/* What others change meanwhile. */

/* Something about a node was changed, and nothing that was seen of it before is to be believed. */
void note_change(Request *request, Node *node) {
    request->n_changes_before = node->changed_at = ++request->core->tables->n_changes; /* its own count for nothing */
}

/* Calls that change names in a directory, or in two, follow. Returns 0, or -1. */
int changes_begin(Request *request, Node *node, Node *other) {
    node->n_changing++;
    other->n_changing++;
    int error = calls_begin(request);
    if (error) {
        node->n_changing--;
        other->n_changing--;
    }
    return error;
}

/* They are done. Returns 0, or -1. */
int changes_end(Request *request, Node *node, Node *other) {
    int error = calls_end(request);
    node->n_changing--;
    other->n_changing--;
    note_change(request, node);
    note_change(request, other);
    return error;
}

/* Whether another request has changed a node, or what is in it, since this one began. */
bool is_changed(const Request *request, const Node *node) {
    return node->n_changing || node->changed_at > request->n_changes_before;
}

/* The type. */

static PyObject *lock_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    if (!PyArg_ParseTuple(args, ""))
        return NULL;
    TurnsLock *self = (TurnsLock *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    pthread_mutex_init(&self->mutex, NULL);
    pthread_mutex_init(&self->section, NULL);
    pthread_cond_init(&self->is_free, NULL);
    return (PyObject *)self;
}

static void lock_free(TurnsLock *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    pthread_mutex_destroy(&self->mutex);
    pthread_mutex_destroy(&self->section);
    pthread_cond_destroy(&self->is_free);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef lock_methods[] = {
    {"acquire", (PyCFunction)lock_acquire, METH_NOARGS, "Have the tables alone."},
    {"release", (PyCFunction)lock_release, METH_NOARGS, "Let others have them; by any thread."},
    {"unshare", (PyCFunction)lock_unshare, METH_NOARGS, "Let them go for a thread of the core's that is in a call."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot lock_slots[] = {
    {Py_tp_doc, "The lock around the tables, which threads of the core share with one another."},
    {Py_tp_new, lock_new},
    {Py_tp_dealloc, lock_free},
    {Py_tp_methods, lock_methods},
    {0, NULL},
};
PyType_Spec turns_lock_spec = {
    .name = "fusefs.mount.native._core.TurnsLock",
    .basicsize = sizeof(TurnsLock),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = lock_slots,
};
