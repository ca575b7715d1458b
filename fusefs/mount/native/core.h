/* The native core: the commonest requests, answered without a line of Python.
 *
 * It works on the tables that the Python code works on, under the same lock, and does of each operation what is done
 * most often: a name in a plain directory, on a local filesystem. All else it leaves alone, before it has changed
 * anything: NOT_OURS, and fuse_operations.py does it. So that is the reference, and this is its shortcut.
 *
 * The interpreter's lock and the tables are held between system calls, and let go for them (turns.c).
 */
#ifndef TRASHD_CORE_H
#define TRASHD_CORE_H

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* What an operation says beside the number of bytes of its answer, and a negative errno. */
enum {
    NOT_OURS = INT_MIN, /* nothing was changed: Python does it */
    RAISED,             /* a Python exception is set */
    LATER,              /* done, and Python finds out how it is to be told: `steps` */
    NO_ANSWER,          /* done, and the kernel expects no answer */
};

/* Objects that a mount's core works on; module.c takes them from its parts by these names. */
#define PARTS(X)                                                                                                       \
    X(lock)             /* TablesLock */                                                                               \
    X(submounts)        /* its Submounts */                                                                            \
    X(turns)            /* its mutex, a TurnsLock */                                                                   \
    X(requests)         /* FuseRequests */                                                                             \
    X(counters)         /* Counters */                                                                                 \
    X(nodes)            /* InodeTable */                                                                               \
    X(open_directories) /* DirectoryFds' OrderedDict */                                                                \
    X(used)             /* its move_to_end */                                                                          \
    X(drop_directory)   /* DirectoryFds' method: drop */                                                               \
    X(open_files)       /* OpenHandles' dict: fds by node */                                                           \
    X(mapped)           /* Passthrough's set */                                                                        \
    X(metadata)         /* MetadataCache */                                                                            \
    X(forget)           /* DaemonCache's method */                                                                     \
    X(ended)            /* DaemonCache's method */                                                                     \
    X(unsteady)         /* its set */                                                                                  \
    X(folding)          /* Submounts' dict: by device */                                                                \
    X(retries)          /* EstaleRetries' dict */                                                                      \
    X(make_room)        /* Opening's method */                                                                         \
    X(opened)           /* Opening's method */                                                                         \
    X(handles)          /* OpenHandles' dict: nodes by handle */                                                       \
    X(openers)          /* its dict */                                                                                 \
    X(executed)         /* its set */                                                                                  \
    X(to_append)        /* its set */                                                                                  \
    X(shares)           /* FairShares */                                                                               \
    X(shares_of_uids)   /* its dict */                                                                                 \
    X(directories)      /* DirectoryFds */                                                                             \
    X(passthrough)      /* Passthrough */                                                                              \
    X(modes)            /* its dict */                                                                                 \
    X(passing_writers)  /* its set */                                                                                  \
    X(passed_by)        /* DaemonCache's set */                                                                        \
    X(writers_of)       /* ContentWriters' method */                                                                   \
    X(OpenMode)                                                                                                        \
    X(writers)          /* a dict: credentials by uid */                                                               \
    X(meets)            /* LookupOperations' method: is_steady */                                                      \
    X(stored)           /* StoredNodes' method: moved */                                                               \
    X(unused)           /* NodeReferences' method: not_taken */                                                        \
    X(numbered)         /* FuseOperations' method: its steps */                                                        \
    X(keeps_pages)      /* FileOperations' method */                                                                   \
    X(told_stale)       /* EstaleRetries' method */                                                                    \
    X(fails)            /* failures.errno_of */                                                                        \
    X(EntryParam)                                                                                                      \
    X(OpenedFile)                                                                                                      \
    X(Fd)

/* Names of attributes, made once. */
#define NAMES(X)                                                                                                       \
    X(is_slow) X(is_careful) X(is_watched) X(is_used) X(rests) X(wakes) X(turn) X(was_away) X(calls) X(borrowed)       \
    X(_n_begun) X(_left_open) X(_away) X(returned) X(shared_by) X(_latency) X(is_in_doubt) X(took) X(names)            \
    X(_rests) X(n_open) X(changed) X(set) X(is_idle) X(_n_given) X(_n) X(_n_fds) X(_give_up)            \
    X(stays_home) X(backing_id) X(hands_out)

#define FIELD(name) PyObject *name;
extern struct names {
    NAMES(FIELD)
} names;

/* What was seen of an inode: by statx, and its file handle. */
#define HANDLE_BYTES 128
typedef struct {
    uint64_t dev, ino, size, blocks, rdev;
    uint32_t mode, nlink, uid, gid, blksize;
    int64_t atime_s, mtime_s, ctime_s, btime_ns;
    uint32_t atime_ns, mtime_ns, ctime_ns;
    struct {
        uint32_t n_bytes;
        int32_t type;
        char bytes[HANDLE_BYTES];
    } handle;
} Seen;

/* Which incarnation of which inode: by its file handle, or where there is none by the time of its birth. */
typedef struct {
    uint64_t dev, ino;
    int64_t btime_ns;
    const char *handle;
    uint32_t n_handle; /* 0: there is none */
} Source;

static inline Source source_of(const Seen *seen) {
    return (Source){seen->dev, seen->ino, seen->btime_ns, (const char *)&seen->handle,
                    2 * (uint32_t)sizeof(uint32_t) + seen->handle.n_bytes};
}

/* Where a node lies: outside of all stores; in one, or it is one; in what a reaper takes from, or it is that. */
typedef enum { OUTSIDE, STORE, TRASH } Zone;

typedef struct Node Node;
typedef struct {
    Node *parent; /* NULL: no name */
    char *name;
} NodeName;
enum { N_OTHERS_MAX = 8 };

/* One incarnation of one inode. */
struct Node {
    uint64_t nodeid, dev, ino;
    int64_t btime_ns;
    Node *next_by_nodeid, *next_by_source;
    NodeName at, *others; /* where it was found last; if it has hard links, some of its other names */
    Seen *last;           /* its attributes when its last link went and it was not open: that is all that is left of it */
    PyObject *object;     /* what Python has of it; with the interpreter's lock */
    uint64_t nlookup;     /* references that the kernel holds */
    uint64_t epoch;       /* of its zone */
    uint64_t changed_at;  /* the number of the newest change of it, or of a name in it */
    double told_until_s;  /* until when the kernel may believe its name and attributes; 0: unknown, or not at all */
    double changed_s;     /* when a name in it was changed; 0: never */
    int64_t page_mtime_ns, page_ctime_ns, page_size; /* when it was opened last; the size is -1: unknown */
    uint32_t n_uses, n_open, n_changing; /* changes of names in it that are under way */
    uint8_t zone;
    bool is_directory, is_live, is_listed; /* it can be found by its source; by its nodeid */
    bool is_told;    /* the kernel was sent its attributes since they were made void: the reply may be on its way */
    bool is_lasting; /* the kernel was sent attributes of this directory that it believes for long */
    uint32_t n_handle;
    char handle[];
};

typedef struct {
    Node **by_nodeid, **by_source, *root;
    uint64_t n_buckets, n_nodes, n_private, n_zoned, epoch, root_dev;
    uint64_t n_changes; /* of nodes and of names, since the beginning */
    bool has_top, hides_root; /* see mount/life/root_inode.py */
} Tables;

typedef struct {
    PyObject_HEAD
    Tables tables;
} InodeTable;

/* The lock around the tables: a turn of Python's has them alone, requests of the core share them. */
typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex; /* of what follows */
    pthread_cond_t is_free;
    bool is_taken;
    int n_waiting, n_sharing;
    pthread_mutex_t section; /* who of those that share them has them now */
    int section_of;          /* the core of that thread, from 1 on. A hint */
} TurnsLock;

/* One mount's. */
typedef struct {
    PyObject_HEAD
    PARTS(FIELD)
    TurnsLock *turns_lock; /* turns */
    struct worker **workers;
    int n_workers;
    Tables *tables;         /* nodes' */
    Py_buffer cells;
    uint64_t *cell;                /* the counters */
    uint32_t cell_of[64];          /* where those of an opcode begin; 0: not ours */
    int n_buckets, first_bits;     /* of the histogram */
    int n_failed, n_total, n_max, n_first_bucket;
    int device;                    /* /dev/fuse */
    int root_fd;
    int n_fds;                     /* for handles and directories together */
    uint64_t root_dev;
    int statx_flags;               /* AT_STATX_DONT_SYNC or 0 */
    bool is_shared, tells_xattrs, hides_labels, acts_as_others, hides_trash;
    bool is_in_doubt;              /* whether the filesystem is slow: when it was last told of */
    double lifetime_s;
    uint64_t quick_ns;             /* a look that takes longer is told */
    char at_rest[24], no_capabilities[24];
    char user_namespace[32];       /* as /proc calls it; empty: unknown */
} Core;

/* A thread that answers requests, and its turns with the tables. */
typedef struct worker {
    PyObject_HEAD
    Core *core;
    PyObject *turn, *calls, *borrowed;
    PyObject *later; /* answers in steps what is done */
    bool was_taken; /* the tables, since the last request */
    bool has_tables;          /* shared with others of the core */
    uint64_t patient_from_ns; /* it does not wait for others awake before that */
    int core_number;          /* of the processor that it is bound to, from 1 on; 0: to none */
} Worker;

/* A request as it has come, wherever its parts lie. */
typedef struct {
    const char *head;    /* struct fuse_in_header */
    const char *own;     /* its operation's own part */
    const char *payload; /* what follows: names, each ended by a NUL */
    uint32_t n_payload;
    char *answer;        /* where the body of its answer goes; may be the payload's memory */
    uint64_t token;      /* by which `later` knows it */
} Incoming;

/* A request that is being answered. */
typedef struct {
    Worker *worker;
    Core *core;
    uint32_t opcode, uid, gid, pid, umask;
    uint64_t unique, nodeid;
    const char *own;     /* its operation's own part */
    const char *payload; /* names, each ended by a NUL */
    uint32_t n_payload;
    char *answer;        /* where its body goes: perhaps the payload's memory, so names are copied before */
    PyThreadState *released;
    bool is_noted;       /* that it is in calls, in which Python may have the tables */
    bool was_away;       /* Python has had them */
    uint64_t n_changes_before;
    int error;           /* that Python is to meet */
    PyObject *steps;     /* LATER: what answers in the end */
} Request;

/* How long some looks take. */
typedef struct {
    uint64_t ns; /* since when; in the end how long */
    long n_waits;
    bool tells; /* something of the filesystem: others had the processor if it took long without a wait */
} Timed;

/* Whether its ids are of our user namespace. */
static inline bool is_known(const Request *request) {
    return request->uid != UINT32_MAX && request->gid != UINT32_MAX;
}

/* A directory, and a name in it. */
typedef struct {
    Node *node;       /* one use */
    const char *name; /* the request's; NULL: none */
    int fd;
} Place;

typedef int (*Operation)(Request *);

/* turns.c */
extern PyType_Spec turns_lock_spec;
void tables_begin(Worker *worker);
void tables_end(Worker *worker);
int turn_begin(Request *request);
int turn_end(Worker *worker);
int calls_begin(Request *request);
int calls_end(Request *request);
int changes_begin(Request *request, Node *node, Node *other);
int changes_end(Request *request, Node *node, Node *other);
bool is_borrowed(const Core *core, const Worker *but, PyObject *fd);
int close_left(Request *request);
void note_change(Request *request, Node *node);
bool is_changed(const Request *request, const Node *node);

/* inode_table.c */
void *allocate(void *old, size_t n_bytes);
void tables_make(Tables *t, const Source *root);
void tables_free(Tables *t);
void show_top(Tables *t, bool is_shown);
Node *node_of(const Tables *t, uint64_t nodeid);
Node *find_node(const Tables *t, const Source *source);
Source source_of_node(const Node *node);
Node *node_take(Node *node);
void node_put(Node *node);
Zone zone_of(Tables *t, Node *node);
bool is_at(const Node *node, const Node *parent, const char *name);
void put_name(Tables *t, Node *node, Node *parent, const char *name, bool is_linked);
void take_away_name(Tables *t, Node *node, Node *parent, const char *name);
void move_node(Tables *t, Node *node, Node *old_parent, const char *old, Node *new_parent, const char *new);
Node *learn_node(Tables *t, const Source *source, bool is_directory, bool is_linked, Node *parent, const char *name);
bool lacks_its_number(const Tables *t, const Node *node);
void renumber(Tables *t, Node *node);
bool drop_unused(Tables *t, Node *node);
bool forget_node(Tables *t, Node *node, uint64_t n);
void detach_node(Tables *t, Node *node, const Seen *seen);

/* inode_table_type.c */
PyObject *object_of(Node *node);
Node *node_from(PyObject *object);
PyObject *source_object(const Source *source);
PyObject *attributes_object(const Seen *seen);
int add_inode_table(PyObject *module);

/* tables.c */
bool is_root(const Core *core, const Node *node);
int may_wait(const Core *core, const char *name);
int is_at_rest(const Request *request);
Node *live_node(const Request *request, uint64_t nodeid);
int open_place(Request *request, uint64_t nodeid, const char *name, Place *place);
void close_place(Place *place);
int directory_fd(Request *request, Node *node);
bool is_outside(Core *core, Node *node);
int number_of(PyObject *object, PyObject *name, uint64_t *value);
bool is_true(PyObject *object, PyObject *name);
bool is_none(PyObject *object, PyObject *name);
bool is_empty(PyObject *object, PyObject *name);
bool has_node(PyObject *set, const Node *node);
Node *learn(Request *request, const Place *place, const Seen *seen);
void counted(Node *node, bool is_told);
void changed(Core *core, Node *node);
void renew(Core *core, Node *node);
int forget_changed(Request *request, const Node *node, const Place *place, const Place *other);
int fd_of_open(Request *request, Node *node);
int tell_took(Request *request, const Timed *timed, int n);
int is_so(PyObject *said);
bool is_stores(const char *name);
bool is_stores_own(const char *name);
int set_number(PyObject *object, PyObject *name, int64_t value);
int add_to(PyObject *object, PyObject *name, int64_t more);
int failed(Core *core);
uint64_t now_ns(void);

/* answers.c */
int put_entry(Request *request, char *to, Node *node, const Seen *seen, bool is_steady);
double put_entry_for(Request *request, char *to, Node *node, const Seen *seen, bool is_steady, double name_s);
void put_attributes(char *to, uint64_t number, const Seen *seen);
int put_missing(Request *request);
int put_attr(Request *request, Node *node, const Seen *seen, bool is_steady);
int is_steady(Core *core, const Node *node);
enum { ENTRY_BYTES = 128, ATTR_BYTES = 104, OPEN_BYTES = 16 };

/* calls.c: without the interpreter's lock */
int look(int fd, const char *name, int flags, Seen *seen);
int handle_of(int fd, const char *name, int flags, Seen *seen);
int peek(int dir_fd, const char *name, int flags, Seen *seen);
int identify(int dir_fd, const char *name, int flags, Seen *seen);
typedef int Look(int dir_fd, const char *name, int flags, Seen *seen);
Timed time_begin(const Core *core);
void time_end(const Core *core, Timed *timed, int n);
/* The way to look at names in a directory: where nothing is renamed but through the mount, `is_changed` tells of it. */
static inline Look *looking(const Request *request) {
    return request->core->is_shared || request->was_away ? peek : identify;
}

/* acting.c: without the interpreter's lock */
enum { N_GROUPS = 64 }; /* of a caller whom Python is not needed for */
/* An identity that a thread takes on for a call, as ThreadCredentials. */
typedef struct {
    uint32_t uid, gid; /* 0: its own */
    const char *sets;  /* capabilities to take up; NULL: what the uid leaves */
    const uint32_t *groups;
    int n_groups;
    bool makes;        /* something, with this umask */
    uint32_t umask, umask_before, uid_before, gid_before;
} Actor;
int act_begin(const Core *core, Actor *actor);
void act_end(const Core *core, const Actor *actor);
/* One act of a caller's, as AsCaller; not to be copied once it is begun. */
typedef struct {
    const Request *request;
    int next; /* of its tries */
    bool is_begun;
    Actor actor;
    uint32_t groups[N_GROUPS];
    char sets[24];
} Acting;
Acting acting_as(const Request *request, bool is_own);
Acting making_as(const Request *request, bool is_own, uint32_t with_umask);
bool acts(Acting *acting, int *error);
bool is_owner(const Request *request, int fd);

/* handles.c */
typedef struct {
    bool passes;
    Actor nobody;   /* as whom a file of nobody's is written; another owner's is with another uid only */
    uint32_t owner; /* for whom it is written; see `file_writer` */
    int32_t id;     /* by which it is passed through; 0: none */
} Opening;
int make_room(Request *request);
int prepare_opening(Request *request, Node *node, uint32_t flags, Opening *opening);
void open_backing(const Request *request, int fd, const Seen *seen, Opening *opening);
PyObject *put_handle(Request *request, Node *node, int fd, uint32_t flags, const Seen *seen,
                     bool is_new, Opening *opening, char *to);
void leave_opening(Request *request, int fd, const Opening *opening);
int let_go(Request *request, PyObject *handle);

/* lookups.c */
typedef struct {
    Node *node;       /* one use */
    Node *above;      /* one use: `dir_fd` is its; NULL: `fd` is of the node itself */
    int fd, dir_fd;
    char name[NAME_MAX + 1]; /* in `dir_fd` */
} Known;
int open_known(Request *request, uint64_t nodeid, Known *known);
void close_known(Known *known);
int reach(const Core *core, const Known *known, Seen *seen, int *fd);

/* endings.c */
int lose(Request *request, const Seen *seen, const Place *place);
int move(Request *request, const Seen *seen, const Place *old, const Place *new);
PyObject *core_forget(Core *core, PyObject *pairs);

/* endings.c, lookups.c, names.c, files.c, listings.c: the operations */
int do_forget(Request *request);
int do_batch_forget(Request *request);
int do_readdirplus(Request *request);
int do_setattr(Request *request);
int do_lookup(Request *request);
int do_getattr(Request *request);
int do_getxattr(Request *request);
int do_listxattr(Request *request);
int do_create(Request *request);
int do_mkdir(Request *request);
int do_unlink(Request *request);
int do_rmdir(Request *request);
int do_rename(Request *request);
int do_rename2(Request *request);
int do_open(Request *request);
int do_release(Request *request);
void write_anywhere(int fd);

/* answering.c */
enum { HEAD_BYTES_IN = 40, HEAD_BYTES_OUT = 16 }; /* struct fuse_in_header, fuse_out_header */
bool is_ours(const Core *core, uint32_t opcode, uint32_t *n_own);
int answer(Worker *worker, const Incoming *incoming);
void put_head(char *to, uint64_t unique, int result);
int worker_begin(Worker *worker, PyObject *core, PyObject *turn, PyObject *later);
void worker_end(Worker *worker);

/* ring.c, dev.c: the transports */
extern PyType_Spec core_ring_spec, core_device_spec;

#endif
