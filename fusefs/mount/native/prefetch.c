/* Prefetching: threads stat many names of a slow filesystem at a time, without Python. A directory that hangs leaves
 * threads for the others. Threads end when there is nothing to do. */
#include "core.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/xattr.h>

enum {
    N_WAITING_MAX = 1 << 14,
    STACK_BYTES = 1 << 18,
    IDLE_S = 10,            /* how long a thread waits for another lookup */
    N_RESULTS_TO_WAKE = 32, /* results that are reported to Python at once */
    GATHER_MS = 1,          /* how long fewer results are gathered */
    VALUE_BYTES = 4096,
    N_XATTRS = 5,
};
static const char *const XATTRS[N_XATTRS] = { /* as in core/metadata_cache.py; the first one: the list of names */
    "", "system.posix_acl_access", "system.posix_acl_default", "security.capability", "security.selinux",
};

typedef struct Queue Queue;

typedef struct Lookup {
    struct Lookup *next;
    Queue *queue;
    PyObject *batch, *object; /* for Python: the batch, and the name */
    const char *name;
    Fd *dir_fd; /* one reference */
    bool wants_handle;  /* the file handle is fetched, too */
    uint32_t xattrs[2]; /* of a file, and of a directory: a bit for each */
    int error;
    Stat st;
    struct {
        bool is_there;
        int n; /* size of the value, or a negative errno */
        char *value;
    } xattr_results[N_XATTRS];
} Lookup;

/* Lookups of one listing, and a limit of how many are under way at a time. */
struct Queue {
    Queue *next;
    uint64_t number;
    Lookup *waiting, **last;
    uint32_t n_running, n_running_max;
};

/* The pool of a mount. It is never freed, as threads may hang in a lookup. */
typedef struct {
    pthread_mutex_t mutex; /* held for a moment only; its holder takes no other lock */
    pthread_cond_t has_work, has_results;
    Queue *queues;
    Lookup *results, **last;
    uint32_t n_waiting, n_results, n_running, n_threads, n_threads_max, n_idle;
    bool has_ended;
} Pool;

typedef struct {
    PyObject_HEAD
    Pool *pool;
} Prefetcher;

/* Threads. */

static void get_xattr(Lookup *lookup, int fd, int number) {
    char path[32], value[VALUE_BYTES];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t n = number ? getxattr(path, XATTRS[number], value, sizeof value) : listxattr(path, value, sizeof value);
    if (n < 0 && errno == ERANGE)
        return; /* a request for this attribute reads it */
    lookup->xattr_results[number].is_there = true;
    lookup->xattr_results[number].n = n < 0 ? -errno : (int)n;
    if (n > 0)
        lookup->xattr_results[number].value = memcpy(allocate(NULL, (size_t)n), value, (size_t)n);
}

static void run_lookup(Lookup *lookup) {
    Stat *st = &lookup->st;
    if (!lookup->wants_handle && !lookup->xattrs[0] && !lookup->xattrs[1]) {
        lookup->error = stat_at(lookup->dir_fd->number, lookup->name, 0, st);
        return;
    }
    int fd = openat(lookup->dir_fd->number, lookup->name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    lookup->error = fd < 0 ? errno : stat_at(fd, "", 0, st);
    if (!lookup->error && lookup->wants_handle)
        lookup->error = fetch_file_handle(fd, "", AT_EMPTY_PATH, st);
    if (!lookup->error && (S_ISREG(st->mode) || S_ISDIR(st->mode)))
        for (int number = 0; number < N_XATTRS; number++)
            if (lookup->xattrs[S_ISDIR(st->mode)] & 1u << number)
                get_xattr(lookup, fd, number);
    if (fd >= 0)
        close(fd);
}

/* Return a queue whose next lookup may begin; NULL: none. */
static Queue *next_queue(const Pool *pool) {
    Queue *queue = pool->has_ended ? NULL : pool->queues;
    while (queue != NULL && (queue->waiting == NULL || queue->n_running >= queue->n_running_max))
        queue = queue->next;
    return queue;
}

static Lookup *begin_lookup(Pool *pool, Queue *queue) {
    Lookup *lookup = queue->waiting;
    queue->waiting = lookup->next;
    if (lookup->next == NULL)
        queue->last = &queue->waiting;
    lookup->next = NULL;
    queue->n_running++, pool->n_running++, pool->n_waiting--;
    return lookup;
}

static void end_lookup(Pool *pool, Lookup *lookup) {
    Queue *queue = lookup->queue;
    *pool->last = lookup;
    pool->last = &lookup->next;
    queue->n_running--, pool->n_running--, pool->n_results++;
    if (pool->n_results == 1 || pool->n_results == N_RESULTS_TO_WAKE || !pool->n_running)
        pthread_cond_signal(&pool->has_results);
    if (queue->waiting == NULL && !queue->n_running) {
        Queue **at = &pool->queues;
        while (*at != queue)
            at = &(*at)->next;
        *at = queue->next;
        free(queue);
    }
}

static bool begin_thread(Pool *pool);

static void *run_lookups(void *argument) {
    Pool *pool = argument;
    cpu_set_t any;
    memset(&any, 0xFF, sizeof any);
    sched_setaffinity(0, sizeof any, &any); /* the thread that started this one may be pinned to a core */
    pthread_mutex_lock(&pool->mutex);
    for (bool has_timed_out = false; !pool->has_ended;) {
        Queue *queue = next_queue(pool);
        if (queue == NULL && has_timed_out)
            break;
        if (queue == NULL) {
            struct timespec end;
            clock_gettime(CLOCK_MONOTONIC, &end);
            end.tv_sec += IDLE_S;
            pool->n_idle++;
            has_timed_out = pthread_cond_timedwait(&pool->has_work, &pool->mutex, &end) == ETIMEDOUT;
            pool->n_idle--;
            continue;
        }
        has_timed_out = false;
        Lookup *lookup = begin_lookup(pool, queue);
        if (!pool->n_idle && next_queue(pool) != NULL)
            begin_thread(pool);
        pthread_mutex_unlock(&pool->mutex);
        run_lookup(lookup);
        pthread_mutex_lock(&pool->mutex);
        end_lookup(pool, lookup);
    }
    pool->n_threads--;
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

/* Start another thread, if possible. Returns whether there is any. */
static bool begin_thread(Pool *pool) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (pool->n_threads == pool->n_threads_max)
        return true;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (!pthread_create(&thread, &attributes, run_lookups, pool))
        pool->n_threads++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return pool->n_threads;
}

/* For Python. */

PyDoc_STRVAR(add_doc, "Queue lookups of names in a directory.\n\n"
                      "batch        is returned with each result\n"
                      "fd           of the directory; the prefetcher closes it in any case\n"
                      "xattrs       attributes to get of files, and of directories: a bit for each\n"
                      "has_handles  file handles are fetched, too\n"
                      "queue        a number: at most n_at_a_time lookups with this number run at a time\n"
                      "Returns      False: too many lookups are waiting, or no thread could be started");

static PyObject *prefetcher_add(Prefetcher *self, PyObject *args) {
    Pool *pool = self->pool;
    Lookup template = {0};
    PyObject *names;
    int fd, has_handles;
    unsigned n_at_a_time;
    unsigned long long number;
    if (!PyArg_ParseTuple(args, "OiO!(II)pKI", &template.batch, &fd, &PyList_Type, &names, &template.xattrs[0],
                          &template.xattrs[1], &has_handles, &number, &n_at_a_time))
        return NULL;
    Py_ssize_t n = PyList_Size(names);
    template.wants_handle = has_handles;
    template.dir_fd = fd_new(fd, -1, 0);
    pthread_mutex_lock(&pool->mutex);
    bool is_accepted = !pool->has_ended && pool->n_waiting + n <= N_WAITING_MAX && (pool->n_idle || begin_thread(pool));
    if (is_accepted && n) {
        Queue *queue = pool->queues;
        while (queue != NULL && queue->number != number)
            queue = queue->next;
        if (queue == NULL) {
            queue = allocate(NULL, sizeof *queue);
            *queue = (Queue){
                .next = pool->queues, .number = number, .last = &queue->waiting, .n_running_max = n_at_a_time};
            pool->queues = queue;
        }
        template.queue = queue;
        for (Py_ssize_t at = 0; at < n; at++) {
            Lookup *lookup = allocate(NULL, sizeof *lookup);
            *lookup = template;
            Py_INCREF(lookup->batch);
            lookup->object = Py_NewRef(PyList_GetItem(names, at));
            lookup->name = PyBytes_AsString(lookup->object);
            fd_take(lookup->dir_fd);
            *queue->last = lookup;
            queue->last = &lookup->next;
            pthread_cond_signal(&pool->has_work);
        }
        pool->n_waiting += (uint32_t)n;
    }
    pthread_mutex_unlock(&pool->mutex);
    fd_put(template.dir_fd);
    return PyBool_FromLong(is_accepted);
}

/* Return the result of a lookup, as LookupResult; None if it failed. */
static PyObject *result_object(const Lookup *lookup) {
    if (lookup->error)
        Py_RETURN_NONE;
    const Stat *st = &lookup->st;
    PyObject *xattr_values = PyDict_New();
    for (int number = 0; xattr_values != NULL && number < N_XATTRS; number++) {
        int n = lookup->xattr_results[number].n;
        if (!lookup->xattr_results[number].is_there)
            continue;
        PyObject *name = PyBytes_FromString(XATTRS[number]);
        PyObject *value = n < 0 ? PyLong_FromLong(-n)
                                : PyBytes_FromStringAndSize(lookup->xattr_results[number].value, n);
        if (name == NULL || value == NULL || PyDict_SetItem(xattr_values, name, value) < 0)
            Py_CLEAR(xattr_values);
        Py_XDECREF(name);
        Py_XDECREF(value);
    }
    Py_ssize_t n_handle = st->handle.n_bytes ? 2 * (Py_ssize_t)sizeof(uint32_t) + st->handle.n_bytes : 0;
    PyObject *attributes = xattr_values == NULL ? NULL : attributes_object(st);
    if (attributes == NULL) {
        Py_XDECREF(xattr_values);
        return NULL;
    }
    return Py_BuildValue("Ny#N", attributes, (const char *)&st->handle, n_handle, xattr_values);
}

static void free_lookup(Lookup *lookup) {
    for (int number = 0; number < N_XATTRS; number++)
        free(lookup->xattr_results[number].value);
    fd_put(lookup->dir_fd);
    Py_DECREF(lookup->batch);
    Py_DECREF(lookup->object);
    free(lookup);
}

static PyObject *prefetcher_results(Prefetcher *self, PyObject *Py_UNUSED(nothing)) {
    Pool *pool = self->pool;
    struct timespec end;
    PyThreadState *released = PyEval_SaveThread();
    pthread_mutex_lock(&pool->mutex);
    while (!pool->n_results && !pool->has_ended)
        pthread_cond_wait(&pool->has_results, &pool->mutex);
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_nsec += GATHER_MS * 1000000;
    end.tv_sec += end.tv_nsec / 1000000000, end.tv_nsec %= 1000000000;
    while (pool->n_results < N_RESULTS_TO_WAKE && pool->n_running && !pool->has_ended &&
           pthread_cond_timedwait(&pool->has_results, &pool->mutex, &end) != ETIMEDOUT) {
    }
    Lookup *results = pool->results;
    pool->results = NULL, pool->last = &pool->results, pool->n_results = 0;
    pthread_mutex_unlock(&pool->mutex);
    PyEval_RestoreThread(released);
    PyObject *list = PyList_New(0);
    for (Lookup *lookup; (lookup = results) != NULL; free_lookup(lookup)) {
        results = lookup->next;
        PyObject *found = list == NULL ? NULL : result_object(lookup);
        PyObject *item = found == NULL ? NULL : Py_BuildValue("OON", lookup->batch, lookup->object, found);
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    released = PyEval_SaveThread();
    close_fds();
    PyEval_RestoreThread(released);
    return list;
}

static PyObject *prefetcher_end(Prefetcher *self, PyObject *Py_UNUSED(nothing)) {
    Pool *pool = self->pool;
    pthread_mutex_lock(&pool->mutex);
    pool->has_ended = true;
    pthread_cond_broadcast(&pool->has_work);
    pthread_cond_broadcast(&pool->has_results);
    pthread_mutex_unlock(&pool->mutex);
    Py_RETURN_NONE;
}

static PyObject *prefetcher_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    pthread_condattr_t monotonic;
    unsigned n_threads_max;
    Prefetcher *self = PyArg_ParseTuple(args, "I", &n_threads_max) ? (Prefetcher *)PyType_GenericAlloc(type, 0) : NULL;
    if (self == NULL)
        return NULL;
    Pool *pool = self->pool = allocate(NULL, sizeof *pool);
    pool->n_threads_max = n_threads_max;
    pool->last = &pool->results;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->has_work, &monotonic);
    pthread_cond_init(&pool->has_results, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return (PyObject *)self;
}

static void prefetcher_free(Prefetcher *self) {
    Py_XDECREF(prefetcher_end(self, NULL));
    free_object(self);
}

static PyMethodDef prefetcher_methods[] = {
    {"add", (PyCFunction)prefetcher_add, METH_VARARGS, add_doc},
    {"results", (PyCFunction)prefetcher_results, METH_NOARGS,
     "Wait for results: batch, name, and its LookupResult. None: the lookup failed."},
    {"end", (PyCFunction)prefetcher_end, METH_NOARGS, "Start no more lookups."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot prefetcher_slots[] = {
    {Py_tp_doc, "Makes lookups of many names of a slow filesystem at a time, by at most n_threads_max threads."},
    {Py_tp_new, prefetcher_new},
    {Py_tp_dealloc, prefetcher_free},
    {Py_tp_methods, prefetcher_methods},
    {0, NULL},
};
PyType_Spec prefetcher_spec = TYPE("Prefetcher", Prefetcher, true, prefetcher_slots);
