/* io_uring: a thread's ring. What has come is answered if it is ours, and the next is waited for, without Python. */
#include "core.h"

#include <sys/syscall.h>

/* struct fuse_uring_req_header: where the operation's own part and the entry's are; the payload follows a page later */
enum { UNIQUE_AT = 8, OWN_AT = 128, ENTRY_AT = 256, SIZE_AT = ENTRY_AT + 16, PAYLOAD_AT = 4096 };
enum { COMMIT_AND_FETCH = 2, URING_CMD = 46, SQE_BYTES = 128, CQE_BYTES = 16 };
enum { GETEVENTS = 1 << 0, EXT_ARG = 1 << 3 };

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
    PyThreadState *released = PyEval_SaveThread();
    tables_end(&ring->worker);
    long n = syscall(SYS_io_uring_enter, ring->fd, n_new, n_wanted, GETEVENTS | (is_timed ? EXT_ARG : 0),
                     is_timed ? &wait : NULL, is_timed ? sizeof wait : 0);
    int error = n < 0 ? errno : 0;
    if (n_wanted)
        tables_begin(&ring->worker);
    PyEval_RestoreThread(released);
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

/* Answer what has come in an entry. Returns 1: it is; 0: Python has to; -1: an exception. */
static int answer_entry(CoreRing *ring, uint64_t token) {
    Slot *slot = &ring->slots[token - 1];
    Incoming incoming = {
        .head = slot->memory, .own = slot->memory + OWN_AT, .payload = slot->memory + PAYLOAD_AT,
        .answer = slot->memory + PAYLOAD_AT, .token = token,
    };
    uint64_t unique;
    memcpy(&incoming.n_payload, slot->memory + SIZE_AT, sizeof incoming.n_payload);
    memcpy(&unique, slot->memory + UNIQUE_AT, sizeof unique);
    int result = answer(&ring->worker, &incoming);
    if (result == NOT_OURS || result == RAISED)
        return result == RAISED ? -1 : 0;
    if (result != LATER) {
        uint32_t n = result > 0 ? (uint32_t)result : 0;
        put_head(slot->memory, unique, result);
        memcpy(slot->memory + SIZE_AT, &n, sizeof n);
        commit(ring, token);
    }
    return 1;
}

/* Whether there is room for one more answer before the kernel has had those that are there; one place stays free, for
 * the read that waits to be woken (FuseRing._await_wake). */
static bool has_room(const CoreRing *ring) { return *ring->sq_tail - *ring->sq_head < ring->sq_mask; }

/* What has come that we have not answered: pairs of token and result. NULL: an exception. More may have come at once
 * than there is room for answers; that is taken the next time, at once. */
static PyObject *take(CoreRing *ring, bool answers) {
    PyObject *found = PyList_New(0);
    uint32_t head; /* read each time: what Python does for an answer may have taken some as well */
    while (found != NULL && (head = *ring->cq_head) != *ring->cq_tail && has_room(ring)) {
        const char *cqe = ring->cqes + (size_t)(head & ring->cq_mask) * CQE_BYTES;
        uint64_t token;
        int32_t result;
        memcpy(&token, cqe, sizeof token);
        memcpy(&result, cqe + 8, sizeof result);
        *ring->cq_head = head + 1;
        int is_answered = 0;
        if (answers && !result && token && token <= (uint64_t)ring->n_slots)
            is_answered = answer_entry(ring, token);
        if (is_answered > 0)
            continue;
        PyObject *one = is_answered < 0 ? NULL : Py_BuildValue("Ki", (unsigned long long)token, (int)result);
        if (one == NULL || PyList_Append(found, one) < 0)
            Py_CLEAR(found);
        Py_XDECREF(one);
    }
    return found;
}

PyDoc_STRVAR(enter_doc, "As IoUring.enter, but that what has come is answered if it is ours; the rest is returned.");

static PyObject *core_ring_enter(CoreRing *ring, PyObject *args) {
    unsigned n_wanted;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "Id", &n_wanted, &timeout_s))
        return NULL;
    ring->worker.was_taken = false;
    if (PyObject_SetAttr(ring->worker.turn, names.shared_by, ring->worker.core->turns) < 0)
        return NULL;
    PyObject *found = NULL;
    int error = 0;
    bool goes_on = true;
    while (goes_on) {
        Py_XDECREF(found);
        error = hand_over(ring, n_wanted, timeout_s);
        found = error && !is_for_now(error) ? NULL : take(ring, n_wanted > 0);
        goes_on = found != NULL && !error && n_wanted && !PyList_Size(found) && !ring->worker.was_taken;
    }
    tables_end(&ring->worker);
    if (error && !is_for_now(error)) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    if (PyObject_SetAttr(ring->worker.turn, names.shared_by, Py_None) < 0)
        Py_CLEAR(found);
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
    if (token == 1)
        ring->worker.core_number = queue + 1;
    Py_RETURN_NONE;
}

static PyObject *core_ring_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *core, *ring, *turn, *later;
    int fd;
    unsigned long long at[6];
    unsigned sq_mask, cq_mask;
    if (!PyArg_ParseTuple(args, "OOOOi(KKKKKKII)", &core, &ring, &turn, &later, &fd, &at[0], &at[1], &at[2], &at[3],
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
    if (worker_begin(&self->worker, core, turn, later) < 0) {
        Py_DECREF(self);
        return NULL;
    }
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
    {0, NULL},
};
PyType_Spec core_ring_spec = {
    .name = "fusefs.mount.native._core.CoreRing",
    .basicsize = sizeof(CoreRing),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = core_ring_slots,
};
