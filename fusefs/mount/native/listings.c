/* READDIRPLUS of a directory that nobody has opened: names, and what each of them is. */
#include "core.h"

#include <dirent.h>
#include <sys/syscall.h>

enum {
    BLOCK_BYTES = 32768,
    N_LOOKED = 64, /* names that are looked at in one go; a slow filesystem is noticed after that */
    HEAD_BYTES = ENTRY_BYTES + 24,
};
static const double SOON_S = 1.0;   /* as in readdir.py */
static const uint32_t BYTES_TOLD = 4; /* as in readdir.py: of an answer, for one that the kernel tells us of a name */

struct name_told {
    uint64_t ino, next;
    uint16_t size;
    uint8_t kind;
    char name[];
} __attribute__((packed));

/* One name of a block. */
typedef struct {
    const struct name_told *found;
    bool is_dot;  /* . and .. */
    bool is_told; /* and still believed: its inode number is enough */
    int error;      /* of the look */
    Seen seen;
} Listed;

typedef struct {
    Request *request;
    Place place;      /* the directory */
    int fd;           /* of it, to be read */
    uint32_t room, n; /* bytes of the answer, and those that are used */
    uint64_t at; /* where what was read ends */
    double now_s;
    bool is_full;
} Listing;

/* Whether the kernel has been told what has a name, which is no directory, and believes it for longer than a moment. */
static bool is_told_already(const Listing *listing, const struct name_told *found) {
    const Node *node = node_of(listing->request->core->tables, found->ino);
    return node != NULL && node->told_until_s > listing->now_s + SOON_S && node->nlookup && !node->is_directory &&
           is_at(node, listing->place.node, found->name);
}

/* Bytes of an answer that an entry takes. */
static uint32_t size_of(const struct name_told *found) {
    return HEAD_BYTES + (((uint32_t)strlen(found->name) + 7) & ~7u);
}

static void put(char *to, const void *from, size_t n) { memcpy(to, from, n); }

/* The end of struct fuse_direntplus: fuse_dirent, its name, and what fills it up. */
static void put_dirent(Listing *listing, const struct name_told *found, uint64_t number, uint32_t kind) {
    char *to = listing->request->answer + listing->n;
    uint32_t n_name = (uint32_t)strlen(found->name), n_all = size_of(found);
    put(to + ENTRY_BYTES, &number, sizeof number);
    put(to + ENTRY_BYTES + 8, &found->next, sizeof found->next);
    put(to + ENTRY_BYTES + 16, &n_name, sizeof n_name);
    put(to + ENTRY_BYTES + 20, &kind, sizeof kind);
    memset(to + n_all - 8, 0, 8);
    put(to + HEAD_BYTES, found->name, n_name);
    listing->n += n_all;
}

/* A name with all that is known of what it means; the kernel has one more reference. */
static void tell_known(Listing *listing, const Listed *listed) {
    Request *request = listing->request;
    Core *core = request->core;
    Place place = {.node = listing->place.node, .name = listed->found->name};
    Node *node = learn(request, &place, &listed->seen);
    bool is_steady = listed->seen.dev == core->root_dev && !is_unsteady(node); /* of what is mounted there Python knows */
    double name_s = is_stores(listed->found->name) ? 0 : core->lifetime_s;
    double believed_s = put_entry_for(request, request->answer + listing->n, node, &listed->seen, is_steady, name_s);
    counted(node, false);
    node->told_until_s = node->n_open ? 0 : listing->now_s + believed_s;
    put_dirent(listing, listed->found, node->nodeid, listed->seen.mode >> 12);
    node_put(node);
}

/* A name alone. `.` and `..` come with their number. */
static void tell_name(Listing *listing, const Listed *listed) {
    char *to = listing->request->answer + listing->n;
    memset(to, 0, ENTRY_BYTES);
    if (listed->is_dot) {
        static const Seen dot = {.mode = S_IFDIR | 0755, .nlink = 1, .blksize = 4096};
        put(to, &listed->found->ino, sizeof listed->found->ino);
        put_attributes(to + 40, listed->found->ino, &dot);
    }
    put_dirent(listing, listed->found, listed->found->ino, listed->is_dot ? DT_DIR : listed->found->kind);
}

/* Look at some names, in that way. */
static void look_at_some(Listing *listing, Look *look_at, Listed *some, int n) {
    Request *request = listing->request;
    const Core *core = request->core;
    int n_looked = 0;
    calls_begin(request);
    Timed timed = time_begin(core);
    for (int at = 0; at < n; at++)
        if (!some[at].is_dot && !some[at].is_told) {
            some[at].error = look_at(listing->place.fd->number, some[at].found->name, core->statx_flags, &some[at].seen);
            n_looked++;
        }
    time_end(core, &timed, n_looked);
    calls_end(request);
    if (n_looked)
        tell_took(request, &timed, n_looked);
    if (look_at == identify && is_changed(request, listing->place.node)) /* each may be of two inodes */
        look_at_some(listing, peek, some, n);
}

/* Tell of some names, for which there is room. */
static void tell_some(Listing *listing, Listed *some, int n) {
    look_at_some(listing, looking(listing->request), some, n);
    for (int at = 0; at < n && !listing->is_full; at++) {
        const Listed *listed = &some[at];
        bool is_known = !listed->is_dot && !listed->is_told;
        if (is_known && listed->error == ENOENT)
            continue; /* it went meanwhile */
        if (is_known && listed->error) {
            listing->is_full = true; /* the next call meets it again, and Python replies */
            if (!listing->n)
                listing->request->error = listed->error;
        } else if (!is_known)
            tell_name(listing, listed);
        else
            tell_known(listing, listed);
    }
}

/* Tell of a block of names. */
static void tell_block(Listing *listing, const char *block, int n_bytes) {
    Core *core = listing->request->core;
    int at = 0;
    bool hides = core->hides_trash && is_root(core, listing->place.node);
    Listed *some = allocate(NULL, N_LOOKED * sizeof *some);
    while (at < n_bytes && !listing->is_full) {
        int n = 0;
        uint32_t end = listing->n;
        bool is_last = false; /* what follows has no room, so it need not be looked at */
        for (; at < n_bytes && n < N_LOOKED; n++) {
            const struct name_told *found = (const struct name_told *)(block + at);
            is_last = end + size_of(found) > listing->room;
            if (is_last)
                break;
            at += found->size;
            listing->at = found->next;
            if (hides && is_stores_own(found->name)) {
                n--;
                continue;
            }
            end += size_of(found);
            some[n] = (Listed){.found = found};
            some[n].is_dot = !strcmp(found->name, ".") || !strcmp(found->name, "..");
            if (!some[n].is_dot) {
                some[n].is_told = may_wait(core, found->name) || is_told_already(listing, found); /* then it is a name alone */
            }
        }
        tell_some(listing, some, n);
        if ((is_last && (listing->n || !n)) || (listing->n && __atomic_load_n(&core->mutex->is_slow, __ATOMIC_RELAXED)))
            listing->is_full = true; /* where it is slow, no other request has to wait for the rest */
    }
    free(some);
}

static void read_all(Listing *listing, uint64_t offset) {
    Request *request = listing->request;
    char *block = allocate(NULL, BLOCK_BYTES);
    uint32_t size = listing->room / BYTES_TOLD;
    long n = 1;
    size = size < 512 ? 512 : size > BLOCK_BYTES ? BLOCK_BYTES : size;
    listing->at = offset;
    while (n > 0 && !listing->is_full) {
        calls_begin(request);
        if (listing->fd < 0)
            listing->fd = openat(listing->place.fd->number, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        n = listing->fd < 0 || lseek(listing->fd, (off_t)listing->at, SEEK_SET) < 0
                ? -1
                : syscall(SYS_getdents64, listing->fd, block, size);
        calls_end(request);
        if (n > 0)
            tell_block(listing, block, (int)n);
    }
    free(block);
    if (n < 0 && !listing->n)
        request->error = ENOENT; /* Python finds out which */
}

int do_readdirplus(Request *request) {
    struct {
        uint64_t fh, offset;
        uint32_t size;
    } in;
    memcpy(&in, request->own, 20);
    Listing listing = {.request = request, .fd = -1, .now_s = now_ns() / 1e9,
                       .room = in.size < BODY_BYTES_MAX ? in.size : BODY_BYTES_MAX};
    if (in.fh || open_place(request, request->nodeid, NULL, &listing.place) < 0)
        return NOT_OURS;
    if (!is_plain(request->core, listing.place.node)) {
        close_place(&listing.place);
        return NOT_OURS;
    }
    read_all(&listing, in.offset);
    if (listing.fd >= 0)
        fd_put(fd_new(listing.fd, -1, 0));
    close_place(&listing.place);
    return request->error ? NOT_OURS : (int)listing.n;
}
