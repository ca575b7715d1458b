/* The native core: serves the requests of a mount.
 *
 * It uses the same tables as the Python code, under the same lock. For a request on a slow backing filesystem, or one
 * that Python has a part in, it returns NOT_OURS; Python then calls `Core.do`.
 *
 * A request takes the interpreter's lock only to call Python, and never while it holds the tables lock. */
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

/* Results of an operation, other than the number of bytes of its reply, or a negative errno. */
enum {
    NOT_OURS = INT_MIN, /* nothing was changed: Python serves the request */
    LATER,              /* done; Python replies when the new node, `created`, has its own number */
    NO_REPLY,           /* done; the kernel expects no reply */
};

/* The attributes of an inode, by statx, and its file handle. */
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
} Stat;

/* A time in ns, modulo 2^64: files may have times after the year 2262. */
static inline int64_t in_ns(int64_t seconds, uint32_t ns) { return (int64_t)((uint64_t)seconds * 1000000000u + ns); }

/* Identifies an incarnation of an inode: by its file handle, or if it has none, by its birth time. */
typedef struct {
    uint64_t dev, ino;
    int64_t btime_ns;
    const char *handle;
    uint32_t n_handle; /* 0: no handle */
} Source;

static inline Source source_of(const Stat *st) {
    return (Source){st->dev, st->ino, st->btime_ns, (const char *)&st->handle,
                    st->handle.n_bytes ? 2 * (uint32_t)sizeof(uint32_t) + st->handle.n_bytes : 0};
}

/* Where a node lies. OUTSIDE: outside of all stores. STORE: it is a store, or in one. TRASH: it is a directory where
 * the reaper deletes, or in one. */
typedef enum { OUTSIDE, STORE, TRASH } Zone;

/* A reference-counted fd, or a counted backing id of a file that is passed through. */
typedef struct Fd {
    int number, device, backing_id; /* device: of the backing id; backing_id: 0: it is an fd */
    uint32_t n_uses;
    struct Fd *next; /* of the fds that a thread is to close */
} Fd;

typedef struct Node Node;

/* A handle of a file or directory that a client has open. */
typedef struct Handle {
    Node *node; /* one reference */
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
    NodeName found_at, *other_names; /* its newest known name; if it has hard links, some of its other names */
    /* Its attributes when its last link was removed while it was not open. All later requests get these. */
    Stat *final_stat;
    Handle *handles;
    /* The backing id while the file is open in passthrough; NULL: the kernel caches its pages. */
    Fd *backing;
    Fd *dir_fd;           /* of a directory, O_PATH */
    /* O_PATH, for a client that got ESTALE; belongs to tables/estale_retries.py. -1: none */
    int kept_fd;
    Node *newer, *older;  /* in the list of nodes with a `dir_fd` */
    PyObject *object;     /* its Python object; access needs the interpreter's lock */
    uint64_t nlookup;     /* references that the kernel holds */
    uint64_t epoch;       /* in which `zone` was determined */
    uint64_t number;      /* position in the order in which nodes were created */
    uint64_t last_change; /* value of `n_changes` when it, or a name in it, last changed */
    double cached_until_s;  /* until when the kernel may cache its name and attributes; 0: unknown, or not at all */
    double changed_s;     /* when a name in it was changed; 0: never */
    int64_t page_mtime_ns, page_ctime_ns, page_size; /* at its last open; a size of -1: unknown */
    int64_t writer_uid; /* the uid that writes it while it is open: see charged_uid; -1: unknown */
    uint32_t n_uses, n_open, n_passing_writers;
    uint32_t n_changing; /* changes of names in it that are in progress */
    uint8_t zone;
    bool is_directory, is_live, is_listed; /* found by its source; found by its nodeid */
    /* The kernel was sent its attributes (of a directory: with its name) since their last invalidation. The reply may
     * still be on its way. */
    bool was_sent;
    bool has_long_timeout; /* the kernel was sent attributes of this directory with a long timeout */
    bool is_case_sensitive; /* this directory, unless that is unknown */
    bool is_mapped;  /* was open for reading and writing in passthrough, and may still be mapped */
    uint32_t n_handle;
    char handle[];
};

typedef struct {
    Node **by_nodeid, **by_source, *root;
    uint64_t n_buckets, n_nodes, n_private, n_made, n_zoned, epoch, root_dev;
    uint64_t n_changes; /* of nodes and names, since the start */
    bool has_top, hides_root; /* see mount/life/root_inode.py */
    Node *newest, *oldest;    /* directories with an fd, except the root */
    uint32_t n_directories, n_directories_max;
    Handle **handles; /* by number */
    uint32_t n_slots, n_handles;
    Share *shares;
    uint32_t n_shares;
    int64_t n_share_handles, n_handles_max;
    uint32_t n_fds; /* for handles and directories together */
    int device;     /* /dev/fuse; -1: not yet known */
    int64_t racy_ns; /* the coarsest timestamp of a filesystem */
    bool is_for_all, is_shared;
    bool passes_through;    /* files are passed through when opened, if possible */
    bool is_caching; /* entries of a slow filesystem are cached, or being fetched: Python makes all changes */
    bool is_case_sensitive; /* the root's filesystem, unless that is unknown */
    bool opens_directories; /* else the kernel opens them without OPENDIR */
    bool lists_with_attributes; /* every entry of a listing is sent with attributes */
    /* No directory that was moved to TRASH still has a long timeout on attributes that the kernel was sent before. */
    bool is_trash_renewed;
    char *blocking_names; /* names of mount points where a stat may block, NUL-terminated; an empty one follows */
    uint32_t retrying_pids[N_RETRIES_MAX]; /* threads that got ESTALE just now */
    uint32_t n_retrying;
} Tables;

typedef struct {
    PyObject_HEAD
    Tables tables;
} TablesObject;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex;
    bool is_slow; /* whether the backing filesystem is slow */
} TablesMutex;

/* The core of one mount. */
typedef struct {
    PyObject_HEAD
    PyObject *calls;    /* Python functions: tree/mount_state.py */
    PyObject *requests; /* FuseRequests */
    TablesMutex *mutex;
    PyObject *nodes;    /* holds the tables */
    Tables *tables;
    Py_buffer cells, rests;
    uint64_t *cell;                /* the counters */
    uint32_t cell_of[64];          /* by opcode: the first cell of its counters; 0: not served here */
    int n_buckets, first_bits;     /* of the histogram */
    int n_failed, n_total, n_max, n_first_bucket;
    int device;                    /* /dev/fuse */
    int mount_fd;                  /* of the backing mount, to open file handles; -1: they can't be opened */
    int watch_wake_fd;             /* eventfd: wakes the thread that watches the readers */
    bool watch_sleeps;
    uint64_t root_dev;
    int statx_flags;               /* AT_STATX_DONT_SYNC or 0, and WITHOUT_HANDLES or 0 */
    uint32_t nobody_gid;           /* a group that owns no file; 0: the thread writes all files as itself */
    int is_measured, is_flushed, shows_xattrs, is_for_all, hides_labels, hides_trash;
    bool is_shared, has_getxattrat, acts_as_others;
    bool is_in_doubt;              /* it is unclear whether the filesystem is slow */
    double lifetime_s;
    unsigned long long quick_ns;   /* a slower statx is reported */
    char at_rest[24], no_capabilities[24];
    char user_namespace[32];       /* name in /proc; empty: unknown */
} Core;

/* A received request, whose parts may be in separate memory. */
typedef struct {
    const char *head;    /* struct fuse_in_header, or less of it: see `size` */
    const char *op_in;   /* its operation's own struct */
    const char *payload; /* the rest: NUL-terminated names, or data */
    uint32_t size, n_payload;
    char *reply_body; /* for the body of its reply; may be the payload's memory */
    void *ring_entry; /* the ring entry that holds it; NULL: read from /dev/fuse */
} RawRequest;

/* A change that Python's cache of a slow filesystem has to forget: of an inode, of a name in a directory, or both. */
typedef struct CacheChange {
    struct CacheChange *next;
    Source source;
    char handle[HANDLE_BYTES + 8]; /* the source's */
    bool has_source, has_ended;
    Node *directory; /* one reference; NULL: none */
    char name[NAME_MAX + 1];
} CacheChange;

/* How long a thread may block for a request that Python replies to; see FuseRequests.answer. */
typedef enum { NO_CALLS, NO_WAITING, ANY_TIME } Patience;

/* A thread that serves requests. */
typedef struct Worker {
    Core *core;
    PyThreadState *released;  /* set while the interpreter's lock is released */
    Patience patience;
    /* Make the callable with which Python replies. */
    PyObject *(*make_reply_callable)(const struct Worker *worker, const RawRequest *raw_request);
} Worker;

/* A request that is being served. */
typedef struct {
    Core *core;
    PyThreadState **released; /* set while the interpreter's lock is released */
    int inode_fd;             /* from Python: an fd of the inode in question, or -1 */
    bool is_from_python;      /* called by Python, which does the remaining work itself */
    bool is_timed;            /* the time of its stats shows how fast the filesystem is */
    bool is_uncacheable;      /* its name may not be cached */
    bool is_unverified;       /* the device was not checked: its attributes may not be cached */
    uint64_t began_ns;
    uint32_t opcode, uid, gid, pid, umask;
    uint64_t unique, nodeid;
    const char *op_in;   /* its operation's own struct */
    const char *payload; /* NUL-terminated names, or data */
    uint32_t n_payload;
    char *reply_body; /* for the body of its reply; may be the payload's memory, so names are copied first */
    uint64_t n_changes_before;
    int error; /* for Python to raise */
    /* For Python, to be reported after the tables lock is released. */
    int n_timed_stats; /* stats that took `timed_stats_ns` together; 0: nothing to report */
    uint64_t timed_stats_ns;
    int refused_errno, refused_fd; /* the kernel has refused a backing file for this fd of `refused_node` */
    Node *refused_node;            /* one reference */
    /* One reference. After LATER, `n_created_bytes` of its reply are ready, to be sent once it has its own number. */
    Node *created;
    int n_created_bytes;
    int n_unused; /* ended nodes that Python may refer to */
    Node *unused_nodes[N_FORGOTTEN_MAX + 1];
    int n_stored;                   /* nodes in TRASH that a client was sent, or that were moved there */
    Node *stored_nodes[2];          /* one reference each */
    bool are_moved, has_left_trash; /* has_left_trash: something was moved out of TRASH, while a cache is in use */
    CacheChange *cache_changes;
} Request;

/* How long some stats take. */
typedef struct {
    uint64_t ns; /* the start; after `stop_stat_timer`, the duration */
    long n_waits;
    bool is_meaningful; /* if not, the thread took long without waiting: other processes had the CPU */
} StatTimer;

/* A directory, and a name in it. */
typedef struct {
    Node *node;       /* one reference */
    const char *name; /* from the request; NULL: none */
    Fd *fd;           /* of the node, one reference */
} Place;

typedef int Operation(Request *);

/* A type of this module. is_made: Python code may create objects of it. */
#define TYPE(name_, object_, is_made, slots_)                                                                          \
    {                                                                                                                  \
        .name = "fusefs.mount.native._core." name_, .basicsize = sizeof(object_), .slots = slots_,                     \
        .flags = Py_TPFLAGS_DEFAULT | ((is_made) ? 0 : Py_TPFLAGS_DISALLOW_INSTANTIATION),                             \
    }
/* Free an object of such a type after its parts have been freed. */
static inline void free_object(void *object) {
    PyTypeObject *type = Py_TYPE((PyObject *)object);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* tables_lock.c */
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
void set_node_name(Tables *t, Node *node, Node *parent, const char *name, bool is_linked);
void forget_name(Tables *t, Node *node, Node *parent, const char *name);
void move_node(Tables *t, Node *node, Node *old_parent, const char *old, Node *new_parent, const char *new);
Node *learn_node(Tables *t, const Source *source, bool is_directory, bool is_linked, Node *parent, const char *name);
bool may_get_own_number(const Tables *t, const Node *node);
void renumber(Tables *t, Node *node);
bool drop_unused(Tables *t, Node *node);
void detach_node(Tables *t, Node *node, const Stat *st);

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
int64_t max_handles_of_user(int64_t n);
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
PyObject *attributes_object(const Stat *st);
int to_node(PyObject *object, void *node);
int to_source(PyObject *key, void *source);
int to_stat(PyObject *attributes, void *st);
PyObject *fd_object(Fd *fd);
void end_uses(void);
int import_types(void);

/* caching_rules.c */
bool is_root(const Core *core, const Node *node);
bool is_plain(Core *core, Node *directory);
bool is_drop_directory(Tables *t, const Node *directory);
bool is_drop_link_name(const Core *core, const Node *directory, const char *name);
bool may_block(const Core *core, const char *name);
bool may_serve_in_core(const Request *request);
int open_place(Request *request, uint64_t nodeid, const char *name, Place *place);
void check_name_cacheable(Request *request, const Place *place);
void check_device(Request *request, uint64_t dev);
void close_place(Place *place);
bool is_outside(Core *core, Node *node);
bool are_names_uncacheable(Request *request, Node *directory, int fd);
Node *node_for_name(Request *request, const Place *place, const Stat *st);
void count_reference(Node *node, bool is_sent);
void notify_inval_inode(const Tables *t, const Node *node);
void note_directory_change(Tables *t, Node *node);
void invalidate_attributes(Tables *t, Node *node);
void invalidate_zone(Tables *t, Zone zone);
bool are_pages_valid(const Tables *t, Node *node, const Stat *st);
void note_cached_change(Request *request, Node *node, const Place *place);
void note_source_change(Request *request, const Source *source, const Place *place, bool has_ended);
void note_refusal(Request *request, Node *node, int error);
void note_stored(Request *request, Node *node, Node *directory, bool is_moved);
void report_stat_time(Request *request, const StatTimer *timer, int n);
bool may_be_store_name(const char *name);
bool is_stores_own(const char *name);
uint64_t now_ns(void);

/* replies.c */
double put_entry_for(Request *request, char *to, Node *node, const Stat *st, bool is_steady, double name_s);
void put_number(char *to, uint64_t nodeid);
double entry_timeout(const Request *request, const Place *place);
void put_attributes(char *to, uint64_t number, const Stat *st);
int put_negative_entry(Request *request, double name_s);
int put_attr(Request *request, Node *node, const Stat *st, bool is_steady);
enum { ENTRY_BYTES = 128, ATTR_BYTES = 104, OPEN_BYTES = 16 };

/* statx.c: without the interpreter's lock */
enum { WITHOUT_HANDLES = 1 << 30 }; /* in statx_flags: a file handle may later be another inode's */
int stat_at(int fd, const char *name, int flags, Stat *st);
int fetch_file_handle(int fd, const char *name, int flags, Stat *st);
int stat_opened(int dir_fd, const char *name, int flags, Stat *st);
int stat_with_handle(int dir_fd, const char *name, int flags, Stat *st);
typedef int StatFunction(int dir_fd, const char *name, int flags, Stat *st);
StatTimer start_stat_timer(const Core *core);
void stop_stat_timer(const Core *core, StatTimer *timer, int n);
/* Return the function that stats names in a directory. If everything is renamed through the mount, `is_changed`
 * detects when a result may mix two inodes. */
static inline StatFunction *stat_function(const Request *request) {
    return request->core->is_shared ? stat_opened : stat_with_handle;
}

/* call_as.c: without the interpreter's lock */
enum { CHOWN = 0, DAC_OVERRIDE = 1, DAC_READ_SEARCH = 2, FOWNER = 3, FSETID = 4 };
enum { N_NEEDS_MAX = 8 };
/* Return whether a filesystem has refused an action. */
static inline bool is_permission_error(int error) { return error == EPERM || error == EACCES; }
static const uint32_t NOBODY = 65534;
static const int64_t ANY_GROUP = -1;
/* A capability that lets a process act on an inode of another owner, and that inode's owner. */
typedef struct {
    uint32_t capability, uid;
    int64_t gid; /* ANY_GROUP: the group does not matter */
} NeededCapability;
/* Two capabilities: for actions that an inode's mode and ACL restrict, and for actions that only its owner may do
 * (inode_owner_or_capable, fs/inode.c). */
static inline NeededCapability override_of_mode(const Stat *st) {
    return (NeededCapability){DAC_OVERRIDE, st->uid, st->gid};
}
static inline NeededCapability only_owner(const Stat *st) { return (NeededCapability){FOWNER, st->uid, ANY_GROUP}; }
/* An identity that a thread assumes for a system call, like ThreadCredentials in Python. */
typedef struct {
    uint32_t uid, gid;           /* 0: the thread's own */
    const char *capability_sets; /* capability sets to assume; NULL: those that setfsuid leaves */
    const uint32_t *groups;
    int n_groups;
    bool is_creating; /* the call creates something, with this umask */
    uint32_t umask, umask_before, uid_before, gid_before;
} Identity;
int assume_identity(const Core *core, Identity *identity);
void restore_identity(const Core *core, const Identity *identity);
/* The attempts at one action as the caller; not to be copied after the first attempt. */
typedef struct {
    const Request *request;
    int next_try;
    bool is_assumed;
    Identity identity;
    NeededCapability needs[N_NEEDS_MAX];
    int n_needs;
    bool lacks_capabilities; /* without the caller's capabilities */
    uint32_t *groups;
    char sets[24];
} CallerAttempts;
CallerAttempts attempt_as_caller(const Request *request, bool is_own);
CallerAttempts attempt_with_needs(const Request *request, const NeededCapability *needs, int n);
CallerAttempts attempt_to_read(const Request *request);
bool is_capable(const Request *request, int capability);
bool keeps_group(const Request *request, const Stat *st);
bool next_attempt(CallerAttempts *attempts, int *error);

/* open_file.c */
typedef struct {
    uint32_t owner; /* the uid that the file's blocks are charged to; see `charged_uid` */
    Fd *backing;    /* backing id for passthrough; NULL: none */
    int error;      /* why there is no backing id, if one was to be opened */
} OpenedBacking;
int may_access(int fd, int mask);
int open_as_caller(const Request *request, int held, const Stat *st, uint32_t flags, int *fd);
void clear_append(int fd);
Identity writer_identity(const Core *core, int fd, uint32_t owner);
uint32_t charged_uid(const Stat *st);
OpenedBacking open_backing(const Request *request, int fd, const Stat *st);
void put_handle(Request *request, Node *node, int fd, uint32_t flags, bool is_kept, OpenedBacking *opening, char *to);

/* open_inode.c */
typedef struct {
    Node *node;              /* one reference */
    Fd *fd;                  /* of the node, one reference; NULL: none is open */
    Node *parent_node;       /* the directory of its newest known name, one reference; NULL: not needed */
    Fd *dir_fd;              /* of `parent_node`, one reference; NULL: not open */
    char name[NAME_MAX + 1]; /* the node's name in `parent_node` */
} Route;
int open_route(Request *request, uint64_t nodeid, Route *route);
PyObject *core_open_node(Core *core, PyObject *object);
void close_route(Route *route);
int stat_by_name(const Core *core, const Route *route, Stat *st);
int open_directory(Core *core, Node *directory, Fd **fd);
int reach_inode(Core *core, Route *route, Stat *st, int *fd);

/* xattr_operations.c */
bool has_getxattrat_calls(void);

/* attribute_operations.c */
uint32_t setid_mode(int fd);
int restore_setid_bits(const Request *request, int fd, uint32_t mode);

/* forget.c */
void note_removed(Request *request, const Stat *st, const Place *place);
void note_moved(Request *request, const Stat *st, const Place *old, const Place *new);
void note_left_trash(Request *request);
void end_unused(Request *request, Node *node);

/* The operations: forget.c, name_operations.c, attribute_operations.c, xattr_operations.c, file_operations.c,
 * listings.c */
Operation do_forget, do_batch_forget, do_opendir, do_readdirplus, do_fsyncdir, do_lookup, do_getattr, do_statx,
    do_setattr, do_statfs, do_access, do_setxattr, do_getxattr, do_listxattr, do_removexattr, do_create, do_tmpfile,
    do_mknod, do_symlink, do_link, do_readlink, do_mkdir, do_unlink, do_rmdir, do_rename, do_rename2, do_open,
    do_read, do_write, do_lseek, do_fallocate, do_copy_file_range, do_copy_file_range_64, do_flush, do_fsync,
    do_release;

/* fuse_requests.c */
enum { HEAD_BYTES_IN = 40, HEAD_BYTES_OUT = 16 }; /* struct fuse_in_header, fuse_out_header */
enum { BODY_BYTES_MAX = 1 << 20 }; /* of a reply: buffers have no more room */
bool has_operation(const Core *core, uint32_t opcode, uint32_t *n_own);
void count(const Core *core, uint32_t at, uint64_t took_ns, bool has_failed);
int serve_raw_request(Worker *worker, const RawRequest *raw_request);
void pass_to_python(Worker *worker, const RawRequest *raw_request);
PyObject *core_do(Core *core, PyObject *args);
void report_unused(Request *request);
bool query_folding(Request *request, Node *directory, int fd);
bool query_device(Request *request, uint64_t dev);
void put_head(char *to, uint64_t unique, int result);
int clear_exception(Core *core);

/* ring_threads.c, device_readers.c: the transports */
extern PyType_Spec core_device_spec, rings_spec, entry_reply_spec;
extern PyTypeObject *entry_reply_type;
extern const int N_RING_THREADS;

/* prefetch.c */
extern PyType_Spec prefetcher_spec;

#endif
