/* Directory handles: OPENDIR, READDIRPLUS, FSYNCDIR; the names of a directory, and the inode of each. */
#include "core.h"

#include <dirent.h>
#include <stdio.h>
#include <sys/syscall.h>

enum {
    BLOCK_BYTES = 32768,
    BLOCK_BYTES_MIN = 512,
    N_STATS = 64, /* names that are stat'ed at once; a slow filesystem is noticed after them */
    HEAD_BYTES = ENTRY_BYTES + 24,
    KEEP_CACHE = 1 << 1, CACHE_DIR = 1 << 3, /* FOPEN_* */
    DATA_ONLY = 1 << 0, /* flag of FSYNCDIR */
    REPLY_RATIO = 4, /* an entry of the reply takes at least this many times the bytes of one from getdents64 */
};
static const double LISTING_GAP_S = 1.0; /* within this time, a process that lists a directory has requested the rest */

struct linux_dirent {
    uint64_t ino, next;
    uint16_t size;
    uint8_t kind;
    char name[];
} __attribute__((packed));

/* A name in a block that getdents64 returned. */
typedef struct {
    const struct linux_dirent *dirent;
    bool is_stat; /* its attributes are sent with it */
    int error;    /* of the lookup */
    Stat st;
} Entry;

typedef struct {
    Request *request;
    Node *node; /* the directory; one reference */
    Fd *fd;     /* of the directory, open for reading; one reference */
    bool is_cacheable; /* its names may be cached */
    uint32_t room, n; /* size of the reply, and bytes that are in use */
    uint64_t offset;  /* the offset after the last entry that was read */
    double now_s;
    bool is_full;
} Listing;

/* Return whether the kernel has this entry cached for more than a moment. If it were sent again, the kernel would drop
 * the file's ACL, and request it again. Attributes of directories may have a shorter timeout. */
static bool is_cached(const Listing *listing, const struct linux_dirent *dirent) {
    const Node *node = node_of(listing->request->core->tables, dirent->ino);
    return node != NULL && node->cached_until_s > listing->now_s + LISTING_GAP_S && node->nlookup &&
           !node->is_directory && is_at(node, listing->node, dirent->name);
}

/* Return whether the attributes of a name are sent with it: not for `.` and `..`, and not where statx may block. */
static bool needs_stat(const Listing *listing, const struct linux_dirent *dirent) {
    const Core *core = listing->request->core;
    if (!strcmp(dirent->name, ".") || !strcmp(dirent->name, ".."))
        return false;
    if (core->tables->lists_with_attributes)
        return true;
    return listing->is_cacheable && !may_block(core, dirent->name) && !is_cached(listing, dirent);
}

/* Return how many bytes an entry takes in a reply. */
static uint32_t size_of(const struct linux_dirent *dirent) {
    return HEAD_BYTES + (((uint32_t)strlen(dirent->name) + 7) & ~7u);
}

static void put(char *to, const void *from, size_t n) { memcpy(to, from, n); }

/* Put the end of struct fuse_direntplus: fuse_dirent, its name, and padding. */
static void put_dirent(Listing *listing, const struct linux_dirent *dirent, uint64_t number, uint32_t kind) {
    char *to = listing->request->reply_body + listing->n;
    uint32_t n_name = (uint32_t)strlen(dirent->name), n_all = size_of(dirent);
    put(to + ENTRY_BYTES, &number, sizeof number);
    put(to + ENTRY_BYTES + 8, &dirent->next, sizeof dirent->next);
    put(to + ENTRY_BYTES + 16, &n_name, sizeof n_name);
    put(to + ENTRY_BYTES + 20, &kind, sizeof kind);
    memset(to + n_all - 8, 0, 8);
    put(to + HEAD_BYTES, dirent->name, n_name);
    listing->n += n_all;
}

/* Put a name with its attributes; the kernel gets one more reference to its node. */
static void put_name_with_attributes(Listing *listing, const Entry *entry) {
    Request *request = listing->request;
    Core *core = request->core;
    Place place = {.node = listing->node, .name = entry->dirent->name};
    Node *node = node_for_name(request, &place, &entry->st);
    bool is_steady = entry->st.dev == core->root_dev && !is_unsteady(node); /* Python tracks mounts inside */
    double name_s = may_be_store_name(place.name) || !listing->is_cacheable ? 0 : core->lifetime_s;
    double cached_s = put_entry_for(request, request->reply_body + listing->n, node, &entry->st, is_steady, name_s);
    count_reference(node, node->is_directory);
    node->cached_until_s = node->n_open ? 0 : listing->now_s + cached_s;
    put_dirent(listing, entry->dirent, node->nodeid, entry->st.mode >> 12);
    node_put(node);
}

/* Put a name only: the kernel sends LOOKUP when a process needs more. */
static void put_name_only(Listing *listing, const struct linux_dirent *dirent) {
    memset(listing->request->reply_body + listing->n, 0, ENTRY_BYTES);
    put_dirent(listing, dirent, dirent->ino, dirent->kind);
}

/* Stat some names with this function. */
static void stat_entries(Listing *listing, StatFunction *stat_name, Entry *entries, int n) {
    Request *request = listing->request;
    const Core *core = request->core;
    int n_stats = 0;
    calls_begin(request);
    StatTimer timer = start_stat_timer(core);
    for (int at = 0; at < n; at++)
        if (entries[at].is_stat) {
            const char *name = entries[at].dirent->name;
            entries[at].error = stat_name(listing->fd->number, name, core->statx_flags, &entries[at].st);
            n_stats++;
        }
    stop_stat_timer(core, &timer, n_stats);
    calls_end(request);
    if (n_stats)
        report_stat_time(request, &timer, n_stats);
    if (stat_name == stat_with_handle && is_changed(request, listing->node)) /* each result may mix two inodes */
        stat_entries(listing, stat_opened, entries, n);
}

/* Put some entries, for which there is room. */
static int put_entries(Listing *listing, Entry *entries, int n) {
    stat_entries(listing, stat_function(listing->request), entries, n);
    for (int at = 0; at < n; at++) {
        const Entry *entry = &entries[at];
        if (!entry->is_stat)
            put_name_only(listing, entry->dirent);
        else if (!entry->error)
            put_name_with_attributes(listing, entry);
        else if (entry->error != ENOENT) /* else the entry was removed in the meantime */
            return entry->error;
    }
    return 0;
}

/* Put a block of entries until the reply is full. Returns 0 or an errno. */
static int put_block(Listing *listing, const char *block, int n_bytes) {
    Core *core = listing->request->core;
    int at = 0, error = 0;
    bool hides = core->hides_trash && is_root(core, listing->node);
    Entry *entries = allocate(NULL, N_STATS * sizeof *entries);
    while (at < n_bytes && !listing->is_full && !error) {
        int n = 0;
        uint32_t end = listing->n;
        bool has_room = true;
        while (at < n_bytes && n < N_STATS) {
            const struct linux_dirent *dirent = (const struct linux_dirent *)(block + at);
            has_room = end + size_of(dirent) <= listing->room;
            if (!has_room)
                break;
            at += dirent->size;
            listing->offset = dirent->next;
            if (hides && is_stores_own(dirent->name))
                continue;
            end += size_of(dirent);
            entries[n++] = (Entry){.dirent = dirent, .is_stat = needs_stat(listing, dirent)};
        }
        error = put_entries(listing, entries, n);
        /* An empty reply would end the listing. On a slow filesystem, a partial reply is sent at once, so that other
         * requests need not wait. */
        bool is_slow = __atomic_load_n(&core->mutex->is_slow, __ATOMIC_RELAXED);
        listing->is_full = listing->n ? !has_room || is_slow : !has_room && !n;
    }
    free(entries);
    return error;
}

/* Read and put entries from an offset on, until the reply is full. Returns 0 or an errno. */
static int put_from(Listing *listing, uint64_t offset) {
    Request *request = listing->request;
    char *block = allocate(NULL, BLOCK_BYTES);
    uint32_t size = listing->room / REPLY_RATIO;
    int n = 1, error = 0;
    size = size < BLOCK_BYTES_MIN ? BLOCK_BYTES_MIN : size > BLOCK_BYTES ? BLOCK_BYTES : size;
    listing->offset = offset;
    while (n > 0 && !error && !listing->is_full) {
        calls_begin(request);
        /* ext4 accepts no offset of a directory that was removed meanwhile. */
        if (lseek(listing->fd->number, (off_t)listing->offset, SEEK_SET) < 0) {
            struct stat found;
            error = errno == EINVAL && !fstat(listing->fd->number, &found) && !found.st_nlink ? ENOENT : errno;
        } else {
            n = (int)syscall(SYS_getdents64, listing->fd->number, block, size);
            error = n < 0 ? errno : 0;
        }
        calls_end(request);
        if (n > 0 && !error)
            error = put_block(listing, block, n);
    }
    free(block);
    return error;
}

/* Get the directory of a handle; or of a nodeid, if the kernel sends no OPENDIR. Returns 0 or a result. */
static int open_listing(Request *request, uint64_t fh, Listing *listing) {
    Tables *t = request->core->tables;
    if (fh) {
        const Handle *handle = handle_of_number(t, fh);
        if (handle == NULL)
            return fh >> 32 ? NOT_OURS : -EBADF; /* a handle that Python has numbered */
        listing->node = node_take(handle->node);
        listing->fd = fd_take(handle->fd);
        return 0;
    }
    Place place;
    int result = open_place(request, request->nodeid, NULL, &place);
    if (result)
        return result == -ESTALE && node_of(t, request->nodeid) != NULL ? -ENOENT : result;
    listing->node = node_take(place.node);
    calls_begin(request);
    int fd = openat(place.fd->number, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), error = errno;
    calls_end(request);
    close_place(&place);
    if (fd < 0)
        return error == ESTALE ? -ENOENT : -error; /* any filesystem reports that for an open directory that was
                                                      removed */
    listing->fd = fd_new(fd, -1, 0);
    return 0;
}

static void close_listing(Listing *listing) {
    fd_put(listing->fd);
    node_put(listing->node);
}

int do_readdirplus(Request *request) {
    struct {
        uint64_t fh, offset;
        uint32_t size;
    } in;
    memcpy(&in, request->op_in, 20);
    Listing listing = {.request = request, .now_s = now_ns() / 1e9,
                       .room = in.size < BODY_BYTES_MAX ? in.size : BODY_BYTES_MAX};
    int result = open_listing(request, in.fh, &listing);
    if (!result) {
        bool is_slow = __atomic_load_n(&request->core->mutex->is_slow, __ATOMIC_RELAXED);
        listing.is_cacheable = !is_slow && !are_names_uncacheable(request, listing.node, listing.fd->number);
        int error = put_from(&listing, in.offset);
        result = listing.n ? (int)listing.n : -error; /* an error after the first entry is returned by the next call */
    }
    close_listing(&listing);
    return result;
}

int do_fsyncdir(Request *request) {
    struct {
        uint64_t fh;
        uint32_t flags;
    } in;
    memcpy(&in, request->op_in, 12);
    Listing listing = {.request = request};
    int result = open_listing(request, in.fh, &listing);
    if (!result) {
        calls_begin(request);
        result = (in.flags & DATA_ONLY ? fdatasync : fsync)(listing.fd->number) < 0 ? -errno : 0;
        calls_end(request);
    }
    close_listing(&listing);
    return result;
}

/* If the kernel need not send OPENDIR, refuse the first one: from then on, the kernel opens directories itself. */
int do_opendir(Request *request) {
    Core *core = request->core;
    Tables *t = core->tables;
    Place place;
    Stat st;
    char path[32];
    int fd = -1, error;
    if (!t->opens_directories)
        return -ENOSYS;
    if (!make_room(t, request->uid))
        return -EMFILE;
    int result = open_place(request, request->nodeid, NULL, &place);
    if (result)
        return result;
    snprintf(path, sizeof path, "/proc/self/fd/%d", place.fd->number);
    calls_begin(request);
    error = stat_at(place.fd->number, "", core->statx_flags, &st);
    if (!error) {
        NeededCapability need = override_of_mode(&st);
        CallerAttempts attempts = attempt_with_needs(request, &need, 1);
        while (next_attempt(&attempts, &error)) {
            fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* "." would need search permission */
            error = fd < 0 ? errno : 0;
        }
    }
    if (!error && core->is_shared)
        error = stat_at(fd, "", core->statx_flags, &st);
    if (error && fd >= 0)
        close(fd);
    calls_end(request);
    note_refusal(request, place.node, error);
    if (!error) {
        bool is_kept = !core->is_shared || are_pages_valid(t, place.node, &st);
        uint32_t flags = !is_outside(core, place.node) ? 0 : is_kept ? CACHE_DIR | KEEP_CACHE : CACHE_DIR;
        uint64_t fh = (uint64_t)fd;
        open_handle(t, place.node, fd, request->uid, O_RDONLY, NULL, -1);
        memset(request->reply_body, 0, OPEN_BYTES);
        put(request->reply_body, &fh, sizeof fh);
        put(request->reply_body + 8, &flags, sizeof flags);
    }
    close_place(&place);
    return error ? -error : OPEN_BYTES;
}
