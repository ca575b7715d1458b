/* FUSE over io_uring: the kernel puts a request into an entry of the queue of its client's CPU core, and of no other
 * queue.
 *
 * An entry is memory for one request and its reply. It belongs to the thread that registered it: the kernel copies to
 * and from it within io_uring_enter, called by that thread. So a thread that blocks elsewhere must have no entry that
 * the kernel may use. Each core has four kinds of threads:
 *
 * - N_SERVERS servers have one entry each. A server serves its request itself, however long it blocks: meanwhile its
 *   only entry is in use.
 * - The dispatcher has all other entries, and passes their requests on. It blocks on nothing else, not even on the
 *   interpreter's lock.
 * - N_HELPERS helpers have no entries. They serve the dispatcher's requests.
 * - The clerk queues the dispatcher's requests for workers of the pool while no helper is free.
 *
 * The kernel uses the entry that was committed last, so the servers register theirs after the dispatcher. If all
 * entries of its queue are in use, a request waits in the kernel until one is committed: a new entry does not help.
 * So the dispatcher registers more entries before they are used up, and gets the CPU before the clients that wake it.
 *
 * Source  linux/fuse.h: fuse_uring_req_header, fuse_uring_cmd_req; fs/fuse/dev_uring.c; docs/internals/decisions/0060 */
#include "core.h"

#include <linux/io_uring.h>
#include <sched.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>

typedef enum { DISPATCHER, CLERK, SERVER, HELPER } Kind;
enum { N_SERVERS = 4, N_HELPERS = 2, N_THREADS = SERVER + N_SERVERS + N_HELPERS };
enum {
    N_ENTRIES = 256,      /* entries of a core's queue at first; two for a core that is not online */
    N_ENTRIES_STEP = 64,  /* when the kernel has fewer than this, as many are added */
    N_ENTRIES_MAX = 8192, /* entries of a dispatcher at most */
    N_RESULTS = 1024, /* size of the completion queue, in locked memory; the kernel keeps further results elsewhere */
    N_SUBMISSIONS = 64,
};
/* Parts of an entry: head of the request or reply, the operation's struct, the kernel's part, and the payload. */
enum { OWN_AT = 128, ENTRY_AT = 256, COMMIT_ID_AT = 264, SIZE_AT = 272, HEADERS_BYTES = 288, PAYLOAD_AT = 4096 };
enum {
    ENTRY_SIZE = PAYLOAD_AT + BODY_BYTES_MAX,
    MAPPED_PAYLOAD_BYTES = 1 << 16 /* of a payload that stay in memory */
};
enum { REGISTER = 1, COMMIT_AND_FETCH = 2 }; /* FUSE's io_uring commands */
enum { WIDE = 1 << 10, SINGLE_ISSUER = 1 << 12, DEFER_TASKRUN = 1 << 13, NO_ARRAY = 1 << 16, WITH_CQ_SIZE = 1 << 3 };
enum { GETEVENTS = 1 << 0, EXT_ARG = 1 << 3, SQE_BYTES = 128, URING_CMD = 46, MSG_RING = 40, SEND_MSG_RING = 31 };

typedef struct CoreRings CoreRings;
typedef struct RingThread RingThread;

typedef struct Entry {
    char *memory;
    RingThread *owner;
    struct Entry *next; /* of the entries that are replied to, or that the clerk has */
    struct iovec parts[2];
    uint16_t queue; /* the kernel's number for it: the core's number */
    uint16_t at;    /* index in the rings' `queues` */
    bool has_been_used, is_free, is_large;
} Entry;

/* Entries that were allocated together. */
typedef struct Block {
    struct Block *next;
    char *memory;
    unsigned n;
    Entry entries[];
} Block;

typedef struct {
    int fd;
    uint32_t *sq_head, *sq_tail, *cq_head, *cq_tail, sq_mask, cq_mask;
    char *sqes;
    struct io_uring_cqe *cqes;
    void *memory;
    size_t n_bytes, n_sqe_bytes;
} Ring;

struct RingThread {
    Worker worker;
    Kind kind;
    CoreRings *rings;
    Ring ring; /* of the dispatcher and the servers only */
    Block *blocks;
    Entry *replied; /* entries to be committed; any thread adds to them */
    bool has_large;
    /* An entry that the dispatcher passes to a helper or the clerk. NULL in a helper: it is free. */
    Entry *assigned;
    sem_t has_work; /* of a helper or the clerk */
};

typedef struct {
    uint16_t number;
    unsigned n_free; /* the dispatcher's entries that the kernel may use */
} Queue;

/* The queues of one core, or of all cores that are not online. */
struct CoreRings {
    PyObject_HEAD
    int device; /* /dev/fuse */
    Queue *queues;
    unsigned n_queues, n_entries; /* of the dispatcher */
    bool is_pinned, has_ended;
    RingThread threads[N_THREADS];
};

/* The callable by which Python replies to a request in an entry. */
typedef struct {
    PyObject_HEAD
    CoreRings *rings;
    Entry *entry; /* NULL: already replied to */
} EntryReply;

PyTypeObject *entry_reply_type;
const int N_RING_THREADS = N_THREADS;
static Entry busy_helper; /* marks a helper that has not started as busy */
static _Thread_local RingThread *this_thread;

/* Rings. */

static int ring_open(Ring *ring, unsigned n_submissions, unsigned n_results) {
    struct io_uring_params p = {.flags = WIDE | SINGLE_ISSUER | DEFER_TASKRUN | NO_ARRAY | WITH_CQ_SIZE,
                                .cq_entries = n_results};
    ring->fd = (int)syscall(SYS_io_uring_setup, n_submissions, &p);
    if (ring->fd < 0)
        return errno;
    ring->n_bytes = p.cq_off.cqes + p.cq_entries * sizeof *ring->cqes;
    ring->n_sqe_bytes = (size_t)p.sq_entries * SQE_BYTES;
    char *memory = ring->memory = mmap(NULL, ring->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, 0);
    ring->sqes = mmap(NULL, ring->n_sqe_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, IORING_OFF_SQES);
    if (memory == MAP_FAILED || ring->sqes == MAP_FAILED)
        return ENOMEM;
    ring->sq_head = (uint32_t *)(memory + p.sq_off.head), ring->sq_tail = (uint32_t *)(memory + p.sq_off.tail);
    ring->cq_head = (uint32_t *)(memory + p.cq_off.head), ring->cq_tail = (uint32_t *)(memory + p.cq_off.tail);
    ring->cqes = (struct io_uring_cqe *)(memory + p.cq_off.cqes);
    ring->sq_mask = p.sq_entries - 1, ring->cq_mask = p.cq_entries - 1;
    return 0;
}

static void ring_close(Ring *ring) {
    if (ring->fd < 0)
        return;
    if (ring->memory != NULL && ring->memory != MAP_FAILED)
        munmap(ring->memory, ring->n_bytes);
    if (ring->sqes != NULL && ring->sqes != MAP_FAILED)
        munmap(ring->sqes, ring->n_sqe_bytes);
    close(ring->fd);
}

static uint32_t n_submitted(const Ring *ring) {
    return *ring->sq_tail - __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE);
}

/* Have the kernel process submissions, and wait for a result: for a second at most, or without limit. Returns 0 or an
 * errno. */
static int enter_ring(Ring *ring, bool waits, bool is_timed) {
    int64_t second[2] = {1, 0};
    struct {
        uint64_t mask;
        uint32_t size, padding;
        uint64_t time;
    } wait = {0, 0, 0, (uint64_t)(uintptr_t)second};
    long n = syscall(SYS_io_uring_enter, ring->fd, n_submitted(ring), waits, GETEVENTS | (is_timed ? EXT_ARG : 0),
                     is_timed ? &wait : NULL, is_timed ? sizeof wait : 0);
    int error = n < 0 ? errno : 0;
    return error == ETIME || error == EINTR || error == EAGAIN || error == EBUSY ? 0 : error;
}

/* Have the kernel process all submissions; if it is short of memory, it may process none at first. */
static int flush(Ring *ring) {
    int error = 0;
    while (n_submitted(ring) && !error)
        error = enter_ring(ring, false, false);
    return error;
}

/* Submit a command for an entry, to be processed by the next `enter_ring`. */
static int submit(RingThread *thread, Entry *entry, uint32_t command, uint64_t commit_id) {
    Ring *ring = &thread->ring;
    int error = n_submitted(ring) > ring->sq_mask ? flush(ring) : 0;
    if (error)
        return error;
    uint32_t tail = *ring->sq_tail, n_parts = 2;
    int32_t device = thread->rings->device;
    uint64_t address = (uint64_t)(uintptr_t)entry->parts, token = (uint64_t)(uintptr_t)entry;
    char *sqe = ring->sqes + (size_t)(tail & ring->sq_mask) * SQE_BYTES;
    memset(sqe, 0, SQE_BYTES);
    sqe[0] = URING_CMD;
    memcpy(sqe + 4, &device, sizeof device);
    memcpy(sqe + 8, &command, sizeof command);
    if (command == REGISTER) {
        memcpy(sqe + 16, &address, sizeof address);
        memcpy(sqe + 24, &n_parts, sizeof n_parts);
    }
    memcpy(sqe + 32, &token, sizeof token);
    memcpy(sqe + 56, &commit_id, sizeof commit_id);
    memcpy(sqe + 64, &entry->queue, sizeof entry->queue);
    __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    return 0;
}

/* Wake a thread that waits in `enter_ring`; called by another thread. The ring of a thread that has ended accepts no
 * message. */
static void wake(const RingThread *thread) {
    struct io_uring_sqe sqe = {.opcode = MSG_RING, .fd = thread->ring.fd};
    while (syscall(SYS_io_uring_register, -1, SEND_MSG_RING, &sqe, 1) < 0 && (errno == ENOMEM || errno == EAGAIN))
        sched_yield();
}

/* Entries. */

/* Register n entries of a thread for a queue. Returns 0 or an errno; a refusal of an entry is in its result. */
static int add_entries(RingThread *thread, unsigned at, unsigned n) {
    Block *block = malloc(sizeof *block + n * sizeof *block->entries);
    if (block == NULL)
        return ENOMEM;
    char *memory = mmap(NULL, (size_t)n * ENTRY_SIZE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        free(block);
        return ENOMEM;
    }
    madvise(memory, (size_t)n * ENTRY_SIZE, MADV_DONTFORK);
    madvise(memory, (size_t)n * ENTRY_SIZE, MADV_NOHUGEPAGE); /* pages that are never touched take no memory */
    *block = (Block){.next = thread->blocks, .memory = memory, .n = n};
    thread->blocks = block;
    Queue *queue = &thread->rings->queues[at];
    int error = 0;
    for (unsigned i = 0; i < n && !error; i++, memory += ENTRY_SIZE) {
        Entry *entry = &block->entries[i];
        *entry = (Entry){
            .memory = memory, .owner = thread, .queue = queue->number, .at = (uint16_t)at, .is_free = true,
            .parts = {{memory, HEADERS_BYTES}, {memory + PAYLOAD_AT, BODY_BYTES_MAX}},
        };
        error = submit(thread, entry, REGISTER, 0);
    }
    if (thread->kind == DISPATCHER)
        queue->n_free += n, thread->rings->n_entries += n;
    return error ? error : flush(&thread->ring);
}

/* Note that a request has arrived in an entry of the dispatcher; register more entries before they are used up. n_next:
 * results that are ready, and not counted yet by this thread. */
static int note_entry_in_use(RingThread *dispatcher, const Entry *entry, uint32_t n_next) {
    CoreRings *rings = dispatcher->rings;
    Queue *queue = &rings->queues[entry->at];
    if (--queue->n_free >= N_ENTRIES_STEP + n_next || rings->n_entries + N_ENTRIES_STEP >= N_ENTRIES_MAX)
        return 0;
    int error = add_entries(dispatcher, entry->at, N_ENTRIES_STEP);
    return error == ENOMEM ? 0 : error; /* ENOMEM: the existing ones must suffice */
}

static RawRequest incoming_of(const Entry *entry) {
    RawRequest raw_request = {
        .head = entry->memory,
        .op_in = entry->memory + OWN_AT,
        .payload = entry->memory + PAYLOAD_AT,
        .reply_body = entry->memory + PAYLOAD_AT,
        .ring_entry = (void *)entry,
    };
    memcpy(&raw_request.size, entry->memory, sizeof raw_request.size);
    memcpy(&raw_request.n_payload, entry->memory + SIZE_AT, sizeof raw_request.n_payload);
    return raw_request;
}

/* Add an entry to a list that any thread may add to, and one thread takes. Returns whether the list was empty. */
static bool push(Entry **list, Entry *entry) {
    Entry *first = __atomic_load_n(list, __ATOMIC_RELAXED);
    do
        entry->next = first; /* once it is in the list, another thread may take it */
    while (!__atomic_compare_exchange_n(list, &first, entry, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
    return first == NULL;
}

/* Have the entry's thread commit the reply that is in the entry. Called by any thread. */
static void queue_reply(Entry *entry, int result) {
    RingThread *owner = entry->owner;
    uint64_t unique;
    uint32_t n = result > 0 ? (uint32_t)result : 0;
    memcpy(&unique, entry->memory + 8, sizeof unique);
    put_head(entry->memory, unique, result);
    memcpy(entry->memory + SIZE_AT, &n, sizeof n);
    entry->is_large |= n > MAPPED_PAYLOAD_BYTES;
    if (push(&owner->replied, entry) && owner != this_thread) /* else it was woken, or commits before it waits */
        wake(owner);
}

static int commit_replied(RingThread *thread) {
    int error = 0;
    Entry *entry = __atomic_exchange_n(&thread->replied, NULL, __ATOMIC_ACQUIRE);
    for (Entry *next; entry != NULL && !error; entry = next) {
        uint64_t commit_id;
        next = entry->next;
        memcpy(&commit_id, entry->memory + COMMIT_ID_AT, sizeof commit_id);
        entry->is_free = true;
        thread->has_large |= entry->is_large;
        if (thread->kind == DISPATCHER)
            thread->rings->queues[entry->at].n_free++;
        error = submit(thread, entry, COMMIT_AND_FETCH, commit_id);
    }
    return error;
}

/* Return to the kernel the memory that large requests and replies took in entries that are now free: FUSE writes to
 * none of these before the next `enter_ring`. */
static void drop_memory(RingThread *thread) {
    thread->has_large = false;
    for (Block *block = thread->blocks; block != NULL; block = block->next)
        for (unsigned at = 0; at < block->n; at++) {
            Entry *entry = &block->entries[at];
            if (entry->is_large && entry->is_free) {
                madvise(entry->memory + PAYLOAD_AT + MAPPED_PAYLOAD_BYTES, BODY_BYTES_MAX - MAPPED_PAYLOAD_BYTES,
                        MADV_DONTNEED);
                entry->is_large = false;
            }
        }
}

/* Threads. */

/* Serve the request in an entry, however long that blocks. */
static void serve_entry(RingThread *thread, Entry *entry) {
    RawRequest raw_request = incoming_of(entry);
    int result = serve_raw_request(&thread->worker, &raw_request);
    if (result == NOT_OURS)
        pass_to_python(&thread->worker, &raw_request);
    else if (result != LATER)
        queue_reply(entry, result == NO_REPLY ? 0 : result);
    close_fds(); /* a server commits its reply after that; until then it gets no other request */
}

/* Have another thread serve the request in an entry of the dispatcher's. */
static void dispatch(CoreRings *rings, Entry *entry) {
    for (int at = SERVER; at < N_THREADS; at++) {
        RingThread *helper = &rings->threads[at];
        Entry *nothing = NULL;
        if (helper->kind == HELPER && __atomic_compare_exchange_n(&helper->assigned, &nothing, entry, false,
                                                                  __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
            sem_post(&helper->has_work);
            return;
        }
    }
    RingThread *clerk = &rings->threads[CLERK];
    push(&clerk->assigned, entry);
    sem_post(&clerk->has_work);
}

static bool is_connection_gone(int error) {
    /* EBADF: /dev/fuse was closed, because the daemon ended before a thread sent its last reply. */
    return error == ENOTCONN || error == ECONNABORTED || error == ECANCELED || error == ENOENT || error == EBADF;
}

/* Process results until there is none. Returns 0 or an errno. */
static int process_results(RingThread *thread) {
    Ring *ring = &thread->ring;
    int error = 0;
    for (uint32_t head; !error && (head = *ring->cq_head) != __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);) {
        const struct io_uring_cqe *cqe = &ring->cqes[head & ring->cq_mask];
        Entry *entry = (Entry *)(uintptr_t)cqe->user_data; /* NULL: a wake-up */
        int result = cqe->res;
        __atomic_store_n(ring->cq_head, head + 1, __ATOMIC_RELEASE);
        if (entry == NULL)
            continue;
        if (result < 0) {
            /* 0: the kernel has refused a new entry. */
            error = is_connection_gone(-result) || entry->has_been_used ? -result : 0;
            continue;
        }
        uint32_t n_payload;
        memcpy(&n_payload, entry->memory + SIZE_AT, sizeof n_payload);
        entry->is_large |= n_payload > MAPPED_PAYLOAD_BYTES;
        entry->has_been_used = true, entry->is_free = false;
        if (thread->kind == DISPATCHER) {
            dispatch(thread->rings, entry);
            error = note_entry_in_use(thread, entry, __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE) - *ring->cq_head);
        } else
            serve_entry(thread, entry);
    }
    return error;
}

/* Serve until the connection ends. Returns the errno that reports this, or another one. */
static int serve_ring(RingThread *thread) {
    int error = 0;
    while (!error) {
        error = commit_replied(thread);
        bool is_timed = thread->has_large;
        if (!error)
            error = enter_ring(&thread->ring, true, is_timed);
        if (!error && is_timed && !n_submitted(&thread->ring) &&
            *thread->ring.cq_head == __atomic_load_n(thread->ring.cq_tail, __ATOMIC_ACQUIRE))
            drop_memory(thread);
        if (!error)
            error = process_results(thread);
    }
    return error;
}

static void wait_for_work(RingThread *thread) {
    while (sem_wait(&thread->has_work) < 0) { /* EINTR */
    }
}

static void run_helper(RingThread *helper) {
    __atomic_store_n(&helper->assigned, NULL, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&helper->rings->has_ended, __ATOMIC_ACQUIRE)) {
        Entry *entry = __atomic_load_n(&helper->assigned, __ATOMIC_ACQUIRE);
        if (entry != NULL) {
            serve_entry(helper, entry);
            __atomic_store_n(&helper->assigned, NULL, __ATOMIC_RELEASE);
        }
        wait_for_work(helper);
    }
}

/* Have workers of the pool serve requests, the oldest first. */
static void run_clerk(RingThread *clerk) {
    while (!__atomic_load_n(&clerk->rings->has_ended, __ATOMIC_ACQUIRE)) {
        Entry *newest = __atomic_exchange_n(&clerk->assigned, NULL, __ATOMIC_ACQUIRE), *oldest = NULL;
        for (Entry *next; newest != NULL; newest = next) {
            next = newest->next;
            newest->next = oldest;
            oldest = newest;
        }
        for (Entry *next; oldest != NULL; oldest = next) {
            RawRequest raw_request = incoming_of(oldest);
            next = oldest->next; /* the reply overwrites it */
            pass_to_python(&clerk->worker, &raw_request);
        }
        wait_for_work(clerk);
    }
}

/* Methods, called by Python threads. */

static bool has_ring(const RingThread *thread) { return thread->kind == DISPATCHER || thread->kind == SERVER; }

/* Let this thread get the CPU as soon as it is woken, even if others are busy. Its work for a request is short, and the
 * kernel limits what all such threads may use (sched(7)). Without the right to that, it requests short time slices: with
 * them, clients on a busy core may still be faster. Source: sched_setattr(2); since Linux 6.12 sched_runtime is the
 * length of a time slice. */
static void run_first(void) {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime_ns, deadline_ns, period_ns;
    } attributes = {.size = sizeof attributes, .nice = getpriority(PRIO_PROCESS, 0), .runtime_ns = 100000};
    struct sched_param lowest = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &lowest) < 0)
        syscall(SYS_sched_setattr, 0, &attributes, 0); /* if refused, this thread only gets the CPU later */
}

static RingThread *thread_of(CoreRings *rings, PyObject *number) {
    long at = PyLong_AsLong(number);
    if (at >= 0 && at < N_THREADS)
        return &rings->threads[at];
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_IndexError, "no such thread");
    return NULL;
}

static PyObject *none_or_error(int error) {
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyObject *rings_prepare(CoreRings *rings, PyObject *number) {
    RingThread *thread = thread_of(rings, number);
    if (thread == NULL)
        return NULL;
    int error = 0;
    if (rings->is_pinned) {
        cpu_set_t core;
        CPU_ZERO(&core);
        CPU_SET(rings->queues[0].number, &core);
        error = sched_setaffinity(0, sizeof core, &core) < 0 ? errno : 0;
    }
    if (thread->kind == DISPATCHER)
        run_first();
    if (!error && has_ring(thread))
        error = thread->kind == SERVER ? ring_open(&thread->ring, 2, 16)
                                       : ring_open(&thread->ring, N_SUBMISSIONS, N_RESULTS);
    return none_or_error(error);
}

static int register_entries(RingThread *thread) {
    CoreRings *rings = thread->rings;
    const Ring *ring = &thread->ring;
    int error = thread->kind == SERVER ? add_entries(thread, 0, 1) : 0;
    for (unsigned at = 0; thread->kind == DISPATCHER && at < rings->n_queues && !error; at++)
        error = add_entries(thread, at, rings->is_pinned ? N_ENTRIES - N_SERVERS : 2);
    /* Refusals have arrived by now; requests that have arrived, too, stay in the ring. */
    for (uint32_t at = *ring->cq_head; !error && at != __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE); at++)
        error = ring->cqes[at & ring->cq_mask].res < 0 ? -ring->cqes[at & ring->cq_mask].res : 0;
    /* Submit an entry that the kernel must refuse: before all queues have entries, a refusal turns io_uring off. */
    if (error && thread->kind == DISPATCHER) {
        Entry refused = {.queue = rings->queues[0].number};
        if (!submit(thread, &refused, REGISTER, 0))
            flush(&thread->ring);
    }
    return error;
}

static PyObject *rings_register(CoreRings *rings, PyObject *number) {
    RingThread *thread = thread_of(rings, number);
    int error = 0;
    if (thread == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (has_ring(thread))
        error = register_entries(thread);
    Py_END_ALLOW_THREADS
    return none_or_error(error);
}

static PyObject *reply_to_entry(const Worker *Py_UNUSED(worker), const RawRequest *raw_request) {
    EntryReply *reply = (EntryReply *)PyType_GenericAlloc(entry_reply_type, 0);
    if (reply == NULL)
        return NULL;
    reply->entry = raw_request->ring_entry;
    reply->rings = (CoreRings *)Py_NewRef((PyObject *)reply->entry->owner->rings);
    return (PyObject *)reply;
}

static PyObject *rings_serve(CoreRings *rings, PyObject *args) {
    PyObject *number, *core;
    if (!PyArg_ParseTuple(args, "OO", &number, &core))
        return NULL;
    RingThread *thread = thread_of(rings, number);
    if (thread == NULL)
        return NULL;
    int error = 0;
    thread->worker = (Worker){
        .core = (Core *)Py_NewRef(core),
        .patience = thread->kind == CLERK ? NO_CALLS : ANY_TIME,
        .make_reply_callable = reply_to_entry,
    };
    this_thread = thread;
    thread->worker.released = PyEval_SaveThread();
    if (thread->kind == CLERK)
        run_clerk(thread);
    else if (thread->kind == HELPER)
        run_helper(thread);
    else {
        error = serve_ring(thread);
        __atomic_store_n(&rings->has_ended, true, __ATOMIC_RELEASE);
        for (int at = 0; at < N_THREADS; at++)
            sem_post(&rings->threads[at].has_work);
    }
    close_fds();
    PyEval_RestoreThread(thread->worker.released);
    Py_DECREF(core);
    return none_or_error(is_connection_gone(error) ? 0 : error);
}

/* Types. */

static PyObject *rings_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    int device, is_pinned;
    PyObject *cores;
    if (!PyArg_ParseTuple(args, "iO!p", &device, &PyList_Type, &cores, &is_pinned))
        return NULL;
    CoreRings *self = (CoreRings *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    for (int at = 0; at < N_THREADS; at++) {
        RingThread *thread = &self->threads[at];
        thread->rings = self, thread->ring.fd = -1;
        thread->kind = at < SERVER ? (Kind)at : is_pinned && at < SERVER + N_SERVERS ? SERVER : HELPER;
        thread->assigned = thread->kind == HELPER ? &busy_helper : NULL;
        sem_init(&thread->has_work, 0, 0);
    }
    self->device = device, self->is_pinned = is_pinned;
    self->n_queues = (unsigned)PyList_Size(cores);
    self->queues = calloc(self->n_queues, sizeof *self->queues);
    for (unsigned at = 0; self->queues != NULL && at < self->n_queues; at++)
        self->queues[at].number = (uint16_t)PyLong_AsLong(PyList_GetItem(cores, (Py_ssize_t)at));
    if (self->queues == NULL)
        PyErr_NoMemory();
    if (PyErr_Occurred()) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void rings_free(CoreRings *self) {
    for (int at = 0; at < N_THREADS; at++) {
        RingThread *thread = &self->threads[at];
        ring_close(&thread->ring);
        for (Block *block; (block = thread->blocks) != NULL; free(block)) {
            thread->blocks = block->next;
            munmap(block->memory, (size_t)block->n * ENTRY_SIZE);
        }
        sem_destroy(&thread->has_work);
    }
    free(self->queues);
    free_object(self);
}

static PyObject *entry_reply_call(EntryReply *self, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *answer, *unique;
    if (!PyArg_ParseTuple(args, "OO", &answer, &unique))
        return NULL;
    Entry *entry = self->entry;
    if (entry == NULL)
        Py_RETURN_NONE;
    int result;
    if (PyLong_Check(answer)) {
        result = -(int)PyLong_AsLong(answer);
    } else {
        Py_buffer view;
        if (PyObject_GetBuffer(answer, &view, PyBUF_SIMPLE) < 0)
            return NULL;
        result = view.len > BODY_BYTES_MAX ? -EIO : (int)view.len;
        if (result > 0)
            memcpy(entry->memory + PAYLOAD_AT, view.buf, (size_t)result);
        PyBuffer_Release(&view);
    }
    self->entry = NULL;
    queue_reply(entry, result);
    Py_RETURN_NONE;
}

static void entry_reply_free(EntryReply *self) {
    Py_XDECREF((PyObject *)self->rings);
    free_object(self);
}

static PyMethodDef rings_methods[] = {
    {"prepare", (PyCFunction)rings_prepare, METH_O,
     "Make the ring of a thread; called by that thread. Raises  OSError"},
    {"register", (PyCFunction)rings_register, METH_O,
     "Give the kernel the entries of a thread. Raises  OSError: it has refused them, and uses /dev/fuse"},
    {"serve", (PyCFunction)rings_serve, METH_VARARGS,
     "Serve as that thread until the connection ends. Raises  OSError: the thread can't continue"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot rings_slots[] = {
    {Py_tp_doc, "The threads and rings of the queues of one core, or of all cores that are not online."},
    {Py_tp_new, rings_new},
    {Py_tp_dealloc, rings_free},
    {Py_tp_methods, rings_methods},
    {0, NULL},
};
PyType_Spec rings_spec = TYPE("CoreRings", CoreRings, true, rings_slots);
static PyType_Slot entry_reply_slots[] = {
    {Py_tp_doc, "The callable by which Python replies to a request in an entry of a ring."},
    {Py_tp_call, entry_reply_call},
    {Py_tp_dealloc, entry_reply_free},
    {0, NULL},
};
PyType_Spec entry_reply_spec = TYPE("EntryReply", EntryReply, false, entry_reply_slots);
