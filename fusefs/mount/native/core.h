/* The native core: the requests of a mount.
 *
 * It works on the tables that the Python code works on, under the same lock. Where the backing filesystem is slow, or
 * Python has a part in a request, that is NOT_OURS; Python has it done then by `Core.do`.
 *
 * Its requests have the interpreter's lock only when they ask Python, or report to it, and never with the tables' lock.
 */
#ifndef TRASHD_CORE_H
#define TRASHD_CORE_H

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <structmember.h>

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

/* What an operation returns beside the number of bytes of its reply, and a negative errno. */
enum {
    NOT_OURS = INT_MIN, /* nothing was changed: Python does it */
    LATER,              /* done, and Python replies when it has its own number: `made` */
    NO_ANSWER,          /* done, and the kernel expects no reply */
};

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

/* A time in ns, modulo 2^64: files may have times after the year 2262. */
static inline int64_t in_ns(int64_t seconds, uint32_t ns) { return (int64_t)((uint64_t)seconds * 1000000000u + ns); }

/* Which incarnation of which inode: by its file handle, or where there is none by the time of its birth. */
typedef struct {
    uint64_t dev, ino;
    int64_t btime_ns;
    const char *handle;
    uint32_t n_handle; /* 0: there is none */
} Source;

static inline Source source_of(const Seen *seen) {
    return (Source){seen->dev, seen->ino, seen->btime_ns, (const char *)&seen->handle,
                    seen->handle.n_bytes ? 2 * (uint32_t)sizeof(uint32_t) + seen->handle.n_bytes : 0};
}

/* Where a node lies: outside of all stores; in one, or it is one; in what a reaper takes from, or it is that. */
typedef enum { OUTSIDE, STORE, TRASH } Zone;

/* A counted fd, or the counted id of a file that is passed through. */
typedef struct Fd {
    int number, device, backing_id; /* of the id; 0: it is an fd */
    uint32_t n_uses;
    struct Fd *next; /* of those that a thread is to close */
} Fd;

typedef struct Node Node;

/* What a client has open. */
typedef struct Handle {
    Node *node; /* one use */
    Fd *fd;
    struct Handle *next; /* of the node */
    uint32_t uid;
    bool writes, may_map, is_executed, appends, is_passed;
} Handle;

typedef struct {
    uint32_t uid;
    int64_t n;
} Share;

typedef struct {
    Node *parent; /* NULL: no name */
    char *name;
} NodeName;
enum { N_OTHERS_MAX = 8, N_RETRIES_MAX = 64, N_FORGOTTEN_MAX = 64 };

/* One incarnation of one inode. */
struct Node {
    uint64_t nodeid, dev, ino;
    int64_t btime_ns;
    Node *next_by_nodeid, *next_by_source;
    NodeName at, *others; /* where it was found last; if it has hard links, some of its other names */
    Seen *last;           /* its attributes when its last link went and it was not open: that is all that is left of it */
    Handle *handles;
    Fd *backing;          /* the id that it is passed through by, while it is open; NULL: the kernel keeps its pages */
    Fd *dir_fd;           /* of a directory, O_PATH */
    int kept_fd;          /* O_PATH, for a client that was sent ESTALE (tables/estale_retries.py), whose it is; -1: none */
    Node *newer, *older;  /* of those with such an fd */
    PyObject *object;     /* what Python has of it; with the interpreter's lock */
    uint64_t nlookup;     /* references that the kernel holds */
    uint64_t epoch;       /* of its zone */
    uint64_t number;      /* in which it was made */
    uint64_t changed_at;  /* the number of the newest change of it, or of a name in it */
    double told_until_s;  /* until when the kernel may believe its name and attributes; 0: unknown, or not at all */
    double changed_s;     /* when a name in it was changed; 0: never */
    int64_t page_mtime_ns, page_ctime_ns, page_size; /* when it was opened last; the size is -1: unknown */
    int64_t writer; /* whom it is written as, while it is open: see file_writer; -1: unknown */
    uint32_t n_uses, n_open, n_passing_writers;
    uint32_t n_changing; /* changes of names in it that are under way */
    uint8_t zone;
    bool is_directory, is_live, is_listed; /* it can be found by its source; by its nodeid */
    bool is_told;    /* the kernel was sent its attributes since they were made void, those of a directory with its name:
                        the reply may be on its way */
    bool is_lasting; /* the kernel was sent attributes of this directory that it believes for long */
    bool is_case_sensitive; /* this directory, as far as that is known */
    bool is_mapped;  /* it was open for reading and writing past us, and may be mapped yet */
    uint32_t n_handle;
    char handle[];
};

typedef struct {
    Node **by_nodeid, **by_source, *root;
    uint64_t n_buckets, n_nodes, n_private, n_made, n_zoned, epoch, root_dev;
    uint64_t n_changes; /* of nodes and of names, since the beginning */
    bool has_top, hides_root; /* see mount/life/root_inode.py */
    Node *newest, *oldest;    /* directories with an fd, but for the root */
    uint32_t n_directories, n_directories_max;
    Handle **handles; /* by number */
    uint32_t n_slots, n_handles;
    Share *shares;
    uint32_t n_shares;
    int64_t n_given, n_handles_max;
    uint32_t n_fds; /* for handles and directories together */
    int device;     /* /dev/fuse; -1: not yet */
    int64_t racy_ns; /* as old as the slowest clock of a filesystem */
    bool is_for_all, is_shared;
    bool passes;    /* what is opened is passed through, if it can be */
    bool is_caching; /* something is cached of a slow filesystem, or is being fetched: changes are Python's */
    bool is_case_sensitive; /* the root's filesystem, as far as that is known */
    bool opens_directories; /* the kernel does not do that itself */
    bool lists_all; /* no entry of a listing is sent by its name alone */
    bool is_trash_renewed;  /* nothing lasts that the kernel was sent of directories before they were moved to TRASH */
    char *waiting;  /* names of mount points where a look may have to wait, each ended by a NUL; and one more */
    uint32_t retries[N_RETRIES_MAX]; /* threads that were sent ESTALE just now */
    uint32_t n_retries;
} Tables;

typedef struct {
    PyObject_HEAD
    Tables tables;
} TablesObject;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex;
    bool is_slow; /* the backing filesystem */
} TablesMutex;

/* One mount's. */
typedef struct {
    PyObject_HEAD
    PyObject *calls;    /* functions of Python's: tree/make_core.py */
    PyObject *requests; /* FuseRequests */
    TablesMutex *mutex;
    PyObject *nodes;    /* that has the tables */
    Tables *tables;
    Py_buffer cells, rests;
    uint64_t *cell;                /* the counters */
    uint32_t cell_of[64];          /* where those of an opcode begin; 0: not ours */
    int n_buckets, first_bits;     /* of the histogram */
    int n_failed, n_total, n_max, n_first_bucket;
    int device;                    /* /dev/fuse */
    int mount_fd;                  /* of the backing mount, to open file handles with; -1: they can't be opened */
    int wake_fd;                   /* an eventfd that wakes who watches the workers */
    bool watch_sleeps;
    uint64_t root_dev;
    int statx_flags;               /* AT_STATX_DONT_SYNC or 0, and WITHOUT_HANDLES or 0 */
    uint32_t nobody_gid;           /* in which no file is; 0: as itself a thread writes all files */
    int is_measured, is_flushed, shows_xattrs, is_for_all, hides_labels, hides_trash;
    bool is_shared, has_getxattrat, acts_as_others;
    bool is_in_doubt;              /* whether the filesystem is slow */
    double lifetime_s;
    unsigned long long quick_ns;   /* a statx that takes longer is reported */
    char at_rest[24], no_capabilities[24];
    char user_namespace[32];       /* as /proc calls it; empty: unknown */
} Core;

/* A request as it has come, wherever its parts lie. */
typedef struct {
    const char *head;    /* struct fuse_in_header, or less of it: see `size` */
    const char *own;     /* its operation's own part */
    const char *payload; /* what follows: names, each ended by a NUL */
    uint32_t size, n_payload;
    char *answer;        /* where the body of its reply goes; may be the payload's memory */
    void *entry;         /* of a ring, in which it has come */
} Incoming;

/* A change that Python's cache of a slow filesystem has to forget: of an inode, of a name in a directory, or of both. */
typedef struct Cached {
    struct Cached *next;
    Source source;
    char handle[HANDLE_BYTES + 8]; /* the source's */
    bool has_source, has_ended;
    Node *directory; /* one use; NULL: none */
    char name[NAME_MAX + 1];
} Cached;

/* How long a thread may take for a request that Python replies to; FuseRequests.answer. */
typedef enum { NO_CALLS, NO_WAITING, ANY_TIME } Patience;

/* A thread that serves requests. */
typedef struct Worker {
    Core *core;
    PyThreadState *released;  /* the interpreter's lock is */
    Patience patience;
    PyObject *(*reply_to)(const struct Worker *worker, const Incoming *incoming); /* what Python calls with its answer */
} Worker;

/* A request that is being answered. */
typedef struct {
    Core *core;
    PyThreadState **released; /* the interpreter's lock is */
    int held;            /* of Python's: an fd of what the request is about, or -1 */
    bool is_pythons;     /* Python has it done, and does itself what the core does not: see is_for_python */
    bool is_timed;       /* how long it takes to stat tells something of the filesystem */
    bool is_fickle;      /* what its name means may not be believed */
    bool is_unasked;     /* what was seen is on a device that was not asked: its attributes may not be believed */
    uint64_t began_ns;
    uint32_t opcode, uid, gid, pid, umask;
    uint64_t unique, nodeid;
    const char *own;     /* its operation's own part */
    const char *payload; /* names, each ended by a NUL */
    uint32_t n_payload;
    char *answer;        /* where its body goes: perhaps the payload's memory, so names are copied before */
    uint64_t n_changes_before;
    int error;           /* that Python is to meet */
    /* What Python hears of when the tables are let go. */
    int n_looks;         /* that have taken so long together; 0: nothing to say */
    uint64_t looks_ns;
    int refused, refused_fd; /* an errno: the kernel has refused a backing file for an fd of `refused_node` */
    Node *refused_node;  /* one use */
    Node *made;          /* one use; LATER: `n_made` bytes of a reply with it are prepared, for when it has its number */
    int n_made;
    int n_unused;        /* nodes that have ended, of which Python may have something */
    Node *unused[N_FORGOTTEN_MAX + 1];
    int n_stored;        /* nodes in what a reaper takes from, of which a client was told; or that were moved there */
    Node *stored[2];     /* one use each */
    bool are_moved, has_come_back; /* the latter: from there, and something is cached */
    Cached *cached;
} Request;

/* How long some looks take. */
typedef struct {
    uint64_t ns; /* since when; in the end how long */
    long n_waits;
    bool tells; /* something of the filesystem: others had the processor if it took long without a wait */
} Timed;

/* A directory, and a name in it. */
typedef struct {
    Node *node;       /* one use */
    const char *name; /* the request's; NULL: none */
    Fd *fd;           /* the node's, one use */
} Place;

typedef int Operation(Request *);

/* A type of this module, which Python code makes objects of, or not. */
#define TYPE(name_, object_, is_made, slots_)                                                                          \
    {                                                                                                                  \
        .name = "fusefs.mount.native._core." name_, .basicsize = sizeof(object_), .slots = slots_,                     \
        .flags = Py_TPFLAGS_DEFAULT | ((is_made) ? 0 : Py_TPFLAGS_DISALLOW_INSTANTIATION),                             \
    }
/* Free an object of such a type, whose parts are freed already. */
static inline void free_object(void *object) {
    PyTypeObject *type = Py_TYPE((PyObject *)object);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* lock.c */
extern PyType_Spec tables_mutex_spec;
void tables_lock(TablesMutex *lock);
void wait_for_tables(TablesMutex *lock);
void tables_unlock(TablesMutex *lock);
void calls_begin(Request *request);
void calls_end(Request *request);
void change_begins(Node *node);
void change_ends(Tables *t, Node *node);
bool has_changed(const Node *node, uint64_t since);
void note_change(Request *request, Node *node);
void changes_begin(Request *request, Node *node, Node *other);
void changes_end(Request *request, Node *node, Node *other);
bool is_changed(const Request *request, const Node *node);

/* inode_table.c */
void *allocate(void *old, size_t n_bytes);
void tables_make(Tables *t, const Source *root, int root_fd);
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
void detach_node(Tables *t, Node *node, const Seen *seen);

/* open_fds.c */
Fd *fd_new(int number, int device, int backing_id);
Fd *fd_take(Fd *fd);
void fd_put(Fd *fd);
extern _Thread_local bool holds_tables;
bool has_fds_to_close(void);
void close_fds(void);
Fd *directory_fd(Tables *t, Node *node);
Fd *keep_directory_fd(Tables *t, Node *node, int number);
void drop_directory_fd(Tables *t, Node *node);
void limit_directories(Tables *t, uint32_t n);
void add_to_share(Tables *t, uint32_t uid, int64_t n);
int64_t most_of_one(int64_t n);
bool make_room(Tables *t, uint32_t uid);
Handle *handle_of_number(const Tables *t, uint64_t fh);
void open_handle(Tables *t, Node *node, int number, uint32_t uid, uint32_t flags, Fd *backing, int64_t writer);
Node *close_handle(Tables *t, uint64_t fh);
bool is_unsteady(const Node *node);
void close_tables(Tables *t);

/* node_type.c, tables_type.c: for Python */
extern PyTypeObject *node_type, *fd_use_type;
extern PyType_Spec node_spec, fd_use_spec, tables_spec;
PyObject *object_of(Node *node);
Node *node_from(PyObject *object);
PyObject *source_object(const Source *source);
PyObject *attributes_object(const Seen *seen);
int to_node(PyObject *object, void *node);
int to_source(PyObject *key, void *source);
int to_seen(PyObject *attributes, void *seen);
PyObject *fd_object(Fd *fd);
void end_uses(void);
int import_types(void);

/* tables.c */
bool is_root(const Core *core, const Node *node);
bool is_plain(Core *core, Node *directory);
bool is_drop_folder(Tables *t, const Node *directory);
bool is_drop_name(const Core *core, const Node *directory, const char *name);
bool may_wait(const Core *core, const char *name);
bool is_at_rest(const Request *request);
int open_place(Request *request, uint64_t nodeid, const char *name, Place *place);
void see_fickle(Request *request, const Place *place);
void see_device(Request *request, uint64_t dev);
void close_place(Place *place);
bool is_outside(Core *core, Node *node);
bool are_fickle_in(Request *request, Node *directory, int fd);
Node *learn(Request *request, const Place *place, const Seen *seen);
void counted(Node *node, bool is_told);
void notify_attributes(const Tables *t, const Node *node);
void changed(Tables *t, Node *node);
void renew(Tables *t, Node *node);
void renew_lasting(Tables *t, Zone zone);
bool pages_are_right(const Tables *t, Node *node, const Seen *seen);
void forget_cached(Request *request, Node *node, const Place *place);
void forget_source(Request *request, const Source *source, const Place *place, bool has_ended);
void mistake(Request *request, Node *node, int error);
void note_stored(Request *request, Node *node, Node *directory, bool is_moved);
void tell_took(Request *request, const Timed *timed, int n);
bool is_stores(const char *name);
bool is_stores_own(const char *name);
uint64_t now_ns(void);

/* answers.c */
double put_entry_for(Request *request, char *to, Node *node, const Seen *seen, bool is_steady, double name_s);
void put_number(char *to, uint64_t nodeid);
double name_lifetime(const Request *request, const Place *place);
void put_attributes(char *to, uint64_t number, const Seen *seen);
int put_missing(Request *request, double name_s);
int put_attr(Request *request, Node *node, const Seen *seen, bool is_steady);
enum { ENTRY_BYTES = 128, ATTR_BYTES = 104, OPEN_BYTES = 16 };

/* calls.c: without the interpreter's lock */
enum { WITHOUT_HANDLES = 1 << 30 }; /* of statx_flags: a file handle may become another inode's */
int look(int fd, const char *name, int flags, Seen *seen);
int handle_of(int fd, const char *name, int flags, Seen *seen);
int peek(int dir_fd, const char *name, int flags, Seen *seen);
int identify(int dir_fd, const char *name, int flags, Seen *seen);
typedef int Look(int dir_fd, const char *name, int flags, Seen *seen);
Timed time_begin(const Core *core);
void time_end(const Core *core, Timed *timed, int n);
/* The way to look at names in a directory: where nothing is renamed but through the mount, `is_changed` tells of it. */
static inline Look *looking(const Request *request) {
    return request->core->is_shared ? peek : identify;
}

/* acting.c: without the interpreter's lock */
enum { CHOWN = 0, DAC_OVERRIDE = 1, DAC_READ_SEARCH = 2, FOWNER = 3, FSETID = 4 };
enum { N_NEEDS_MAX = 8 };
/* Whether a filesystem has refused an act. */
static inline bool is_refusal(int error) { return error == EPERM || error == EACCES; }
static const uint32_t NOBODY = 65534;
static const int64_t ANY_GROUP = -1;
/* A capability by which a process that is not the owner's may do something, and whose inode that is. */
typedef struct {
    uint32_t capability, uid;
    int64_t gid; /* ANY_GROUP: whatever it is */
} Need;
/* For what an inode's mode and ACL allow; for what is its owner's to change in it (inode_owner_or_capable in fs/inode.c). */
static inline Need by_mode(const Seen *seen) { return (Need){DAC_OVERRIDE, seen->uid, seen->gid}; }
static inline Need by_owner_alone(const Seen *seen) { return (Need){FOWNER, seen->uid, ANY_GROUP}; }
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
/* One act of a caller's; not to be copied once it is begun. */
typedef struct {
    const Request *request;
    int next; /* of its tries */
    bool is_begun;
    Actor actor;
    Need needs[N_NEEDS_MAX];
    int n_needs;
    bool is_powerless; /* it has none of the caller's capabilities */
    uint32_t *groups;
    char sets[24];
} Acting;
Acting acting_as(const Request *request, bool is_own);
Acting acting_by(const Request *request, const Need *needs, int n);
Acting reading_as(const Request *request);
bool is_capable(const Request *request, int capability);
bool keeps_group(const Request *request, const Seen *seen);
bool acts(Acting *acting, int *error);

/* handles.c */
typedef struct {
    uint32_t owner; /* for whom it is written; see `file_writer` */
    Fd *backing;    /* the id by which it is passed through; NULL: none */
    int error;      /* why there is none, if there should be one */
} Opening;
int may_access(int fd, int mask);
int open_held(const Request *request, int held, const Seen *seen, uint32_t flags, int *fd);
void write_anywhere(int fd);
Actor writer_of(const Core *core, int fd, uint32_t owner);
uint32_t owner_to_write_as(const Seen *seen);
Opening open_backing(const Request *request, int fd, const Seen *seen);
void put_handle(Request *request, Node *node, int fd, uint32_t flags, bool is_kept, Opening *opening, char *to);

/* reach.c */
typedef struct {
    Node *node;       /* one use */
    Fd *fd;           /* of it, one use; NULL: it has no open one */
    Node *above;      /* the directory where it was found last, one use; NULL: it is not needed */
    Fd *dir_fd;       /* of that, one use; NULL: it is not open */
    char name[NAME_MAX + 1]; /* there */
} Known;
int open_known(Request *request, uint64_t nodeid, Known *known);
PyObject *core_hold(Core *core, PyObject *object);
void close_known(Known *known);
int look_by_name(const Core *core, const Known *known, Seen *seen);
int open_directory(Core *core, Node *directory, Fd **fd);
int reach(Core *core, Known *known, Seen *seen, int *fd);

/* xattrs.c */
bool can_getxattrat(void);

/* attributes.c */
uint32_t bits_before(int fd);
int keep_bits(const Request *request, int fd, uint32_t mode);

/* endings.c */
void lose(Request *request, const Seen *seen, const Place *place);
void move(Request *request, const Seen *seen, const Place *old, const Place *new);
void come_back(Request *request);
void end_unused(Request *request, Node *node);

/* endings.c, names.c, attributes.c, xattrs.c, files.c, listings.c: the operations */
Operation do_forget, do_batch_forget, do_opendir, do_readdirplus, do_fsyncdir, do_lookup, do_getattr, do_statx,
    do_setattr, do_statfs, do_access, do_setxattr, do_getxattr, do_listxattr, do_removexattr, do_create, do_tmpfile,
    do_mknod, do_symlink, do_link, do_readlink, do_mkdir, do_unlink, do_rmdir, do_rename, do_rename2, do_open,
    do_read, do_write, do_lseek, do_fallocate, do_copy_file_range, do_copy_file_range_64, do_flush, do_fsync,
    do_release;

/* answering.c */
enum { HEAD_BYTES_IN = 40, HEAD_BYTES_OUT = 16 }; /* struct fuse_in_header, fuse_out_header */
enum { BODY_BYTES_MAX = 1 << 20 }; /* of an answer: there is room for no more */
bool is_ours(const Core *core, uint32_t opcode, uint32_t *n_own);
void count(const Core *core, uint32_t at, uint64_t took_ns, bool has_failed);
int answer(Worker *worker, const Incoming *incoming);
void ask_python(Worker *worker, const Incoming *incoming);
PyObject *core_do(Core *core, PyObject *args);
void tell_unused(Request *request);
bool ask_folds(Request *request, Node *directory, int fd);
bool ask_device(Request *request, uint64_t dev);
void put_head(char *to, uint64_t unique, int result);
int failed(Core *core);

/* ring.c, dev.c: the transports */
extern PyType_Spec core_device_spec, rings_spec, entry_reply_spec;
extern PyTypeObject *entry_reply_type;
extern const int N_RING_THREADS;

/* prefetch.c */
extern PyType_Spec prefetcher_spec;

#endif
