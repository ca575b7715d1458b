/* A thread's ring: what has come is answered if it is ours, and the next is waited for, without a line of Python. */
#include "core.h"

#include <sys/syscall.h>

/* struct fuse_uring_req_header: where the operation's own part and the entry's are; the payload follows a page later */
enum { OWN_AT = 128, ENTRY_AT = 256, SIZE_AT = ENTRY_AT + 16, PAYLOAD_AT = 4096 };
enum { COMMIT_AND_FETCH = 2, URING_CMD = 46, SQE_BYTES = 128, CQE_BYTES = 16 };
enum { GETEVENTS = 1 << 0, EXT_ARG = 1 << 3 };
enum { ANSWER_HEAD_BYTES = 16 };
enum { NAMES_BYTES = 8192 }; /* that any entry has room for; names are shorter */

struct head { /* fuse_in_header */
    uint32_t size, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid, more;
};

typedef struct {
    Operation act;
    uint32_t n_own;   /* bytes of its own part that it takes */
    uint32_t n_names; /* that follow */
} Handler;

static const Handler handlers[] = {
    [1] = {do_lookup, 0, 1},     [3] = {do_getattr, 0, 0},  [4] = {do_setattr, 88, 0}, [9] = {do_mkdir, 8, 1},
    [10] = {do_unlink, 0, 1},     [11] = {do_rmdir, 0, 1},    [12] = {do_rename, 8, 2},
    [14] = {do_open, 8, 0},      [18] = {do_release, 8, 0}, [22] = {do_getxattr, 8, 1},
    [23] = {do_listxattr, 8, 0},
    [35] = {do_create, 16, 1},    [44] = {do_readdirplus, 40, 0},
    [45] = {do_rename2, 16, 2},
};
enum { N_HANDLERS = sizeof handlers / sizeof *handlers };

/* Whether a payload is so many names, each ended by a NUL, and none of them empty. */
static bool are_names(const char *payload, uint32_t n_payload, uint32_t n_names) {
    uint32_t begin = 0, n = 0;
    for (uint32_t at = 0; at < n_payload; at++)
        if (!payload[at]) {
            if (at == begin)
                return false;
            begin = at + 1;
            n++;
        }
    return n == n_names && begin == n_payload;
}

static int count(Core *core, uint32_t opcode, uint64_t took_ns, bool has_failed) {
    uint64_t *cell = core->cell + core->cell_of[opcode];
    uint64_t parts = took_ns >> core->first_bits;
    int bucket = parts ? 64 - __builtin_clzll(parts) : 0;
    cell[core->n_first_bucket + (bucket < core->n_buckets ? bucket : core->n_buckets - 1)]++;
    cell[core->n_total] += took_ns;
    if (took_ns > cell[core->n_max])
        cell[core->n_max] = took_ns;
    if (has_failed)
        cell[core->n_failed]++;
    if (!is_true(core->counters, names._rests))
        return 0;
    PyObject *nothing = PyObject_CallMethodObjArgs(core->counters, names.changed, NULL);
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

static void put_head(Slot *slot, uint64_t unique, int result) {
    uint32_t n = result > 0 ? (uint32_t)result : 0;
    int32_t error = result < 0 ? result : 0;
    uint32_t size = ANSWER_HEAD_BYTES + n;
    memcpy(slot->memory, &size, sizeof size);
    memcpy(slot->memory + 4, &error, sizeof error);
    memcpy(slot->memory + 8, &unique, sizeof unique);
    memcpy(slot->memory + SIZE_AT, &n, sizeof n);
}

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
    tables_end(ring);
    long n = syscall(SYS_io_uring_enter, ring->fd, n_new, n_wanted, GETEVENTS | (is_timed ? EXT_ARG : 0),
                     is_timed ? &wait : NULL, is_timed ? sizeof wait : 0);
    int error = n < 0 ? errno : 0;
    if (n_wanted)
        tables_begin(ring);
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
    int32_t device = ring->core->device;
    memset(sqe, 0, SQE_BYTES);
    sqe[0] = URING_CMD;
    memcpy(sqe + 4, &device, sizeof device);
    memcpy(sqe + 8, &command, sizeof command);
    memcpy(sqe + 32, &token, sizeof token);
    memcpy(sqe + 56, slot->memory + ENTRY_AT + 8, sizeof(uint64_t)); /* the number to commit by */
    memcpy(sqe + 64, &slot->queue, sizeof slot->queue);
    *ring->sq_tail = tail + 1;
}

/* Have what is done answered in the end by its steps, which take turns. */
static int tell_later(CoreRing *ring, uint64_t token, const Request *request, uint64_t began_ns) {
    tables_end(ring);
    if (PyObject_SetAttr(ring->turn, names.shared_by, Py_None) < 0)
        return -1;
    PyObject *nothing =
        PyObject_CallFunction(ring->later, "KOKIIK", (unsigned long long)token, request->steps,
                              (unsigned long long)request->unique, request->pid, request->opcode,
                              (unsigned long long)began_ns);
    Py_XDECREF(nothing);
    PyThreadState *released = PyEval_SaveThread();
    tables_begin(ring);
    PyEval_RestoreThread(released);
    return nothing == NULL ? -1 : PyObject_SetAttr(ring->turn, names.shared_by, ring->core->turns);
}

/* Answer what has come in an entry. Returns 1: it is; 0: Python has to; -1: an exception. */
int answer(CoreRing *ring, uint64_t token) {
    Core *core = ring->core;
    Slot *slot = &ring->slots[token - 1];
    struct head head;
    uint32_t n_payload;
    memcpy(&head, slot->memory, sizeof head);
    memcpy(&n_payload, slot->memory + SIZE_AT, sizeof n_payload);
    if (head.opcode >= N_HANDLERS || handlers[head.opcode].act == NULL || !core->cell_of[head.opcode])
        return 0;
    const Handler *handler = &handlers[head.opcode];
    Request request = {
        .ring = ring, .core = core, .opcode = head.opcode, .uid = head.uid, .gid = head.gid, .pid = head.pid,
        .unique = head.unique, .nodeid = head.nodeid, .own = slot->memory + OWN_AT,
        .payload = slot->memory + PAYLOAD_AT, .n_payload = n_payload, .answer = slot->memory + PAYLOAD_AT,
    };
    if (head.size < sizeof head + handler->n_own + n_payload ||
        (handler->n_names && (n_payload > NAMES_BYTES || !are_names(request.payload, n_payload, handler->n_names))))
        return 0;
    uint64_t began_ns = now_ns();
    if (turn_begin(&request) < 0)
        return -1;
    int result = is_at_rest(&request) && !is_true(ring->turn, names.hands_out) ? handler->act(&request) : NOT_OURS;
    if (result == RAISED)
        result = -failed(core);
    if (result > NOT_OURS && result != LATER) {
        if (result == -ESTALE) {
            PyObject *nothing = PyObject_CallFunction(core->told_stale, "I", request.pid);
            Py_XDECREF(nothing);
        }
        if (count(core, head.opcode, now_ns() - began_ns, result < 0) < 0)
            result = -failed(core);
        put_head(slot, head.unique, result);
    }
    if (turn_end(ring) < 0 || close_left(&request) < 0)
        return -1;
    int is_answered = 1;
    if (result == LATER)
        is_answered = tell_later(ring, token, &request, began_ns);
    else if (result == NOT_OURS)
        is_answered = 0;
    else
        commit(ring, token);
    Py_XDECREF(request.steps);
    if (PyErr_Occurred())
        return -1;
    return is_answered < 0 ? -1 : result != NOT_OURS;
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
            is_answered = answer(ring, token);
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
    ring->was_taken = false;
    if (PyObject_SetAttr(ring->turn, names.shared_by, ring->core->turns) < 0)
        return NULL;
    PyObject *found = NULL;
    int error = 0;
    bool goes_on = true;
    while (goes_on) {
        Py_XDECREF(found);
        error = hand_over(ring, n_wanted, timeout_s);
        found = error && !is_for_now(error) ? NULL : take(ring, n_wanted > 0);
        goes_on = found != NULL && !error && n_wanted && !PyList_Size(found) && !ring->was_taken;
    }
    tables_end(ring);
    if (error && !is_for_now(error)) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    if (PyObject_SetAttr(ring->turn, names.shared_by, Py_None) < 0)
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
    self->core = (Core *)Py_NewRef(core);
    self->ring = Py_NewRef(ring);
    self->turn = Py_NewRef(turn);
    self->later = Py_NewRef(later);
    self->calls = PyObject_GetAttr(turn, names.calls);
    self->borrowed = PyObject_GetAttr(turn, names.borrowed);
    self->fd = fd;
    self->sq_head = (uint32_t *)(uintptr_t)at[0], self->sq_tail = (uint32_t *)(uintptr_t)at[1];
    self->cq_head = (uint32_t *)(uintptr_t)at[2], self->cq_tail = (uint32_t *)(uintptr_t)at[3];
    self->sqes = (char *)(uintptr_t)at[4], self->cqes = (char *)(uintptr_t)at[5];
    self->sq_mask = sq_mask, self->cq_mask = cq_mask;
    struct core_ring **rings = PyMem_Realloc(self->core->rings, (size_t)(self->core->n_rings + 1) * sizeof *rings);
    if (self->calls == NULL || self->borrowed == NULL || rings == NULL) {
        Py_DECREF(self);
        return rings == NULL ? PyErr_NoMemory() : NULL;
    }
    self->core->rings = rings;
    rings[self->core->n_rings++] = self;
    return (PyObject *)self;
}

static void core_ring_free(CoreRing *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Core *core = self->core;
    for (int at = 0; at < core->n_rings; at++)
        if (core->rings[at] == self)
            core->rings[at] = core->rings[--core->n_rings];
    Py_DECREF((PyObject *)core);
    Py_XDECREF(self->ring);
    Py_XDECREF(self->turn);
    Py_XDECREF(self->later);
    Py_XDECREF(self->calls);
    Py_XDECREF(self->borrowed);
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
