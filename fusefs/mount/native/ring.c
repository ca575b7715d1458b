/* io_uring: a thread's ring. What has come is answered if it is ours, and the next is waited for, without Python. */
#include "core.h"

#include <sys/syscall.h>

/* struct fuse_uring_req_header: where the operation's own part and the entry's are; the payload follows a page later */
enum { UNIQUE_AT = 8, OWN_AT = 128, ENTRY_AT = 256, SIZE_AT = ENTRY_AT + 16, PAYLOAD_AT = 4096 };
enum { COMMIT_AND_FETCH = 2, URING_CMD = 46, SQE_BYTES = 128, CQE_BYTES = 16 };
enum { GETEVENTS = 1 << 0, EXT_ARG = 1 << 3 };
enum { N_COME = 64 }; /* that Python gets at a time */

/* An entry of a queue: memory that the kernel and we share. */
typedef struct {
    char *memory;
    uint16_t queue;
} Slot;

typedef struct {
    Worker worker;
    PyObject *ring; /* the FuseRing, which owns the memory */
    int fd;
    uint32_t *sq_head, *sq_tail, *cq_head, *cq_tail, sq_mask, cq_mask;
    char *sqes, *cqes;
    Slot *slots; /* by token - 1 */
    int n_slots;
} CoreRing;

/* Hand over what was submitted, and wait for some results. Returns 0 or an errno. */
static int hand_over(CoreRing *ring, unsigned n_wanted, double timeout_s) {
    int64_t time[2];
    struct {
        uint64_t mask;
        uint32_t size, padding;
        uint64_t time;
    } wait = {0, 0, 0, (uint64_t)(uintptr_t)time};
    bool is_timed = timeout_s < 1e9;
    if (is_timed)
        time[0] = (int64_t)timeout_s, time[1] = (int64_t)((timeout_s - (double)time[0]) * 1e9);
    uint32_t n_new = *ring->sq_tail - *ring->sq_head;
    work_ends(&ring->worker);
    long n = syscall(SYS_io_uring_enter, ring->fd, n_new, n_wanted, GETEVENTS | (is_timed ? EXT_ARG : 0),
                     is_timed ? &wait : NULL, is_timed ? sizeof wait : 0);
    int error = n < 0 ? errno : 0;
    return error;
}

/* Whether an errno says that it is to be tried again. */
static bool is_for_now(int error) { return error == ETIME || error == EINTR || error == EAGAIN || error == EBUSY; }

/* There must be room for it: see `take`. */
static void commit(CoreRing *ring, uint64_t token) {
    Slot *slot = &ring->slots[token - 1];
    uint32_t tail = *ring->sq_tail, command = COMMIT_AND_FETCH;
    char *sqe = ring->sqes + (size_t)(tail & ring->sq_mask) * SQE_BYTES;
    int32_t device = ring->worker.core->device;
    memset(sqe, 0, SQE_BYTES);
    sqe[0] = URING_CMD;
    memcpy(sqe + 4, &device, sizeof device);
    memcpy(sqe + 8, &command, sizeof command);
    memcpy(sqe + 32, &token, sizeof token);
    memcpy(sqe + 56, slot->memory + ENTRY_AT + 8, sizeof(uint64_t)); /* the number to commit by */
    memcpy(sqe + 64, &slot->queue, sizeof slot->queue);
    *ring->sq_tail = tail + 1;
}

/* Answer what has come in an entry. Returns whether it is answered; else Python has to. */
static bool answer_entry(CoreRing *ring, uint64_t token) {
    Slot *slot = &ring->slots[token - 1];
    Incoming incoming = {
        .head = slot->memory, .own = slot->memory + OWN_AT, .payload = slot->memory + PAYLOAD_AT,
        .answer = slot->memory + PAYLOAD_AT, .token = token,
    };
    uint64_t unique;
    memcpy(&incoming.n_payload, slot->memory + SIZE_AT, sizeof incoming.n_payload);
    memcpy(&unique, slot->memory + UNIQUE_AT, sizeof unique);
    work_begins(&ring->worker);
    int result = answer(&ring->worker, &incoming);
    if (result == NOT_OURS)
        return false;
    if (result != LATER) {
        uint32_t n = result > 0 ? (uint32_t)result : 0;
        put_head(slot->memory, unique, result);
        memcpy(slot->memory + SIZE_AT, &n, sizeof n);
        commit(ring, token);
    }
    return true;
}

/* Whether there is room for one more answer before the kernel has had those that are there; one place stays free, for
 * the read that waits to be woken (FuseRing._await_wake). */
static bool has_room(const CoreRing *ring) { return *ring->sq_tail - *ring->sq_head < ring->sq_mask; }

typedef struct {
    uint64_t token;
    int32_t result;
} Come;

/* What has come that we have not answered. Returns how many. More may have come at once than there is room for answers;
 * that is taken the next time, at once. */
static size_t take(CoreRing *ring, bool answers, Come *come) {
    size_t n = 0;
    uint32_t head; /* read each time: what Python does for an answer may have taken some as well */
    while (n < N_COME && (head = *ring->cq_head) != __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE) && has_room(ring)) {
        const char *cqe = ring->cqes + (size_t)(head & ring->cq_mask) * CQE_BYTES;
        memcpy(&come[n].token, cqe, sizeof come[n].token);
        memcpy(&come[n].result, cqe + 8, sizeof come[n].result);
        __atomic_store_n(ring->cq_head, head + 1, __ATOMIC_RELEASE);
        bool is_request = answers && !come[n].result && come[n].token && come[n].token <= (uint64_t)ring->n_slots;
        if (!is_request || !answer_entry(ring, come[n].token))
            n++;
    }
    return n;
}

PyDoc_STRVAR(enter_doc, "As IoUring.enter, but that what has come is answered if it is ours; the rest is returned.");

static PyObject *core_ring_enter(CoreRing *ring, PyObject *args) {
    Worker *worker = &ring->worker;
    unsigned n_wanted;
    double timeout_s;
    Come come[N_COME];
    size_t n = 0;
    int error;
    bool goes_on;
    if (!PyArg_ParseTuple(args, "Id", &n_wanted, &timeout_s))
        return NULL;
    worker->released = PyEval_SaveThread();
    do {
        error = hand_over(ring, n_wanted, timeout_s);
        if (!error || is_for_now(error))
            n = take(ring, n_wanted > 0, come);
        close_fds();
        goes_on = !error && n_wanted && !n && !__atomic_load_n(&worker->is_held_up, __ATOMIC_RELAXED);
    } while (goes_on);
    if (n)
        work_begins(worker); /* Python's */
    else
        work_ends(worker);
    PyEval_RestoreThread(worker->released);
    if (error && !is_for_now(error)) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    PyObject *found = PyList_New((Py_ssize_t)n);
    for (size_t at = 0; found != NULL && at < n; at++) {
        PyObject *one = Py_BuildValue("Ki", (unsigned long long)come[at].token, (int)come[at].result);
        if (one == NULL || PyList_SetItem(found, (Py_ssize_t)at, one) < 0)
            Py_CLEAR(found);
    }
    return found;
}

PyDoc_STRVAR(add_doc, "Answer what comes in an entry: its number from 1 on, the address of its memory, its queue.");

static PyObject *core_ring_add(CoreRing *ring, PyObject *args) {
    unsigned long long address;
    int token, queue;
    if (!PyArg_ParseTuple(args, "iKi", &token, &address, &queue))
        return NULL;
    if (token != ring->n_slots + 1) {
        PyErr_SetString(PyExc_ValueError, "entries come one after the other");
        return NULL;
    }
    Slot *slots = PyMem_Realloc(ring->slots, (size_t)token * sizeof *slots);
    if (slots == NULL)
        return PyErr_NoMemory();
    slots[token - 1] = (Slot){(char *)(uintptr_t)address, (uint16_t)queue};
    ring->slots = slots;
    ring->n_slots = token;
    Py_RETURN_NONE;
}

static PyObject *core_ring_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *core, *ring, *later;
    int fd;
    unsigned long long at[6];
    unsigned sq_mask, cq_mask;
    if (!PyArg_ParseTuple(args, "OOOi(KKKKKKII)", &core, &ring, &later, &fd, &at[0], &at[1], &at[2], &at[3],
                          &at[4], &at[5], &sq_mask, &cq_mask))
        return NULL;
    CoreRing *self = (CoreRing *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->ring = Py_NewRef(ring);
    self->fd = fd;
    self->sq_head = (uint32_t *)(uintptr_t)at[0], self->sq_tail = (uint32_t *)(uintptr_t)at[1];
    self->cq_head = (uint32_t *)(uintptr_t)at[2], self->cq_tail = (uint32_t *)(uintptr_t)at[3];
    self->sqes = (char *)(uintptr_t)at[4], self->cqes = (char *)(uintptr_t)at[5];
    self->sq_mask = sq_mask, self->cq_mask = cq_mask;
    worker_begin(&self->worker, core, later);
    return (PyObject *)self;
}

static void core_ring_free(CoreRing *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    worker_end(&self->worker);
    Py_XDECREF(self->ring);
    PyMem_Free(self->slots);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef core_ring_methods[] = {
    {"enter", (PyCFunction)core_ring_enter, METH_VARARGS, enter_doc},
    {"add", (PyCFunction)core_ring_add, METH_VARARGS, add_doc},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot core_ring_slots[] = {
    {Py_tp_doc, "One thread's ring, whose requests a core answers."},
    {Py_tp_new, core_ring_new},
    {Py_tp_dealloc, core_ring_free},
    {Py_tp_methods, core_ring_methods},
    {Py_tp_getset, worker_getset},
    {0, NULL},
};
PyType_Spec core_ring_spec = {
    .name = "fusefs.mount.native._core.CoreRing",
    .basicsize = sizeof(CoreRing),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = core_ring_slots,
};
