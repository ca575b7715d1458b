/* Puts replies into a buffer: struct fuse_entry_out and fuse_attr_out, with entry and attr timeouts. */
#include "core.h"

static const double SHORT_S = 1.0; /* as in tree/kernel_timeouts.py */
/* Attr timeout of a directory whose name is not cached: the kernel requests its attributes after each lookup, and
 * before each step of a renameat2 that checks permissions. */
static const double MOMENT_S = 0.01;

static void put32(char *to, uint32_t value) { memcpy(to, &value, sizeof value); }
static void put64(char *to, uint64_t value) { memcpy(to, &value, sizeof value); }

static void put_time(char *seconds, char *ns, double lifetime_s) {
    uint64_t all_ns = (uint64_t)(lifetime_s * 1e9);
    put64(seconds, all_ns / 1000000000u);
    put32(ns, (uint32_t)(all_ns % 1000000000u));
}

/* struct fuse_attr: 88 bytes. */
void put_attributes(char *to, uint64_t number, const Stat *st) {
    const uint64_t longs[] = {number, st->size, st->blocks, st->atime_s, st->mtime_s, st->ctime_s};
    const uint32_t words[] = {st->atime_ns, st->mtime_ns, st->ctime_ns,       st->mode,    st->nlink,
                              st->uid,      st->gid,      (uint32_t)st->rdev, st->blksize, 0};
    memcpy(to, longs, sizeof longs);
    memcpy(to + sizeof longs, words, sizeof words);
}

/* Return whether attributes of a directory get the whole timeout, like AttrTimeouts._has_long_timeout. */
static bool has_long_timeout(const Core *core, Node *node) {
    node->has_long_timeout = core->tables->device >= 0 &&
                             (!node->changed_s || now_ns() / 1e9 - node->changed_s >= SHORT_S);
    return node->has_long_timeout;
}

/* Return the attr timeout, like AttrTimeouts.timeouts_of. */
static double attr_timeout(const Request *request, Node *node, const Stat *st, double timeout_s, bool is_steady) {
    const Core *core = request->core;
    bool is_set = st->mode & S_ISUID || (st->mode & S_ISGID && st->mode & S_IXGRP);
    if (!is_steady || (is_set && S_ISREG(st->mode)))
        return 0;
    if (request->is_uncacheable && S_ISDIR(st->mode)) /* the kernel sends GETATTR before each step of a renameat2 */
        return MOMENT_S;
    if (timeout_s <= SHORT_S)
        return timeout_s;
    if (S_ISDIR(st->mode))
        return has_long_timeout(core, node) ? timeout_s : SHORT_S;
    return st->nlink > 1 ? SHORT_S : timeout_s;
}

/* Return how long the kernel may cache a reply; the result from a slow filesystem is as old as the request. */
static double reply_timeout(const Request *request) {
    const Core *core = request->core;
    if (!__atomic_load_n(&core->mutex->is_slow, __ATOMIC_RELAXED))
        return core->lifetime_s;
    double remaining_s = core->lifetime_s - (double)(now_ns() - request->began_ns) / 1e9;
    return remaining_s > 0 ? remaining_s : 0;
}

/* Return the entry timeout of a name. */
double entry_timeout(const Request *request, const Place *place) {
    return request->is_uncacheable || is_changed(request, place->node) ? 0 : reply_timeout(request);
}

/* Return whether the attributes that were read have not changed, and may be cached for their device. */
static bool is_stat_current(const Request *request, const Node *node) {
    return !request->is_unverified && !is_changed(request, node);
}

/* Put the nodeid into struct fuse_entry_out. */
void put_number(char *to, uint64_t nodeid) {
    put64(to, nodeid);
    put64(to + 40, nodeid);
}

/* Put struct fuse_entry_out with an entry timeout of name_s. Returns for how long the whole entry may be cached. */
double put_entry_for(Request *request, char *to, Node *node, const Stat *st, bool is_steady, double name_s) {
    Core *core = request->core;
    double attributes_s = attr_timeout(request, node, st, name_s, is_steady && is_stat_current(request, node));
    put64(to, node->nodeid);
    put64(to + 8, 0);
    put_time(to + 16, to + 32, name_s);
    put_time(to + 24, to + 36, attributes_s);
    put_attributes(to + 40, is_root(core, node) ? st->ino : node->nodeid, st);
    return attributes_s < name_s ? attributes_s : name_s;
}

/* Put a negative entry with an entry timeout of name_s. */
int put_negative_entry(Request *request, double name_s) {
    memset(request->reply_body, 0, ENTRY_BYTES);
    put_time(request->reply_body + 16, request->reply_body + 32, name_s);
    return ENTRY_BYTES;
}

/* Put struct fuse_attr_out. Returns its size. */
int put_attr(Request *request, Node *node, const Stat *st, bool is_steady) {
    Core *core = request->core;
    double timeout_s = request->is_uncacheable ? 0 : reply_timeout(request);
    double attributes_s = attr_timeout(request, node, st, timeout_s, is_steady && is_stat_current(request, node));
    put_time(request->reply_body, request->reply_body + 8, attributes_s);
    put32(request->reply_body + 12, 0);
    put_attributes(request->reply_body + 16, is_root(core, node) ? st->ino : node->nodeid, st);
    return ATTR_BYTES;
}
