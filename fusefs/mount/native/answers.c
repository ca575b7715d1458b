/* Answers, put into the entry's memory: struct fuse_entry_out and fuse_attr_out, and for how long they are believed. */
#include "core.h"

static const double SHORT_S = 1.0; /* as in validity.py */
/* For attributes of a directory whose name is not believed: the kernel asks for them again after each look at a name, and
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
void put_attributes(char *to, uint64_t number, const Seen *seen) {
    const uint64_t longs[] = {number, seen->size, seen->blocks, seen->atime_s, seen->mtime_s, seen->ctime_s};
    const uint32_t words[] = {seen->atime_ns, seen->mtime_ns, seen->ctime_ns,       seen->mode,    seen->nlink,
                              seen->uid,      seen->gid,      (uint32_t)seen->rdev, seen->blksize, 0};
    memcpy(to, longs, sizeof longs);
    memcpy(to + sizeof longs, words, sizeof words);
}

/* Whether what a directory is may be believed for the whole time, as AttrTimeouts._lasts. */
static bool lasts(const Core *core, Node *node) {
    node->is_lasting = core->tables->device >= 0 && (!node->changed_s || now_ns() / 1e9 - node->changed_s >= SHORT_S);
    return node->is_lasting;
}

/* For how long attributes may be believed, as AttrTimeouts.lifetimes. */
static double attr_s(const Request *request, Node *node, const Seen *seen, double timeout_s, bool is_steady) {
    const Core *core = request->core;
    bool is_set = seen->mode & S_ISUID || (seen->mode & S_ISGID && seen->mode & S_IXGRP);
    if (!is_steady || (is_set && S_ISREG(seen->mode)))
        return 0;
    if (request->is_fickle && S_ISDIR(seen->mode)) /* the kernel asks before each step of a renameat2 */
        return MOMENT_S;
    if (timeout_s <= SHORT_S)
        return timeout_s;
    if (S_ISDIR(seen->mode))
        return lasts(core, node) ? timeout_s : SHORT_S;
    return seen->nlink > 1 ? SHORT_S : timeout_s;
}

/* How long the kernel may cache a reply: what a slow filesystem returned is as old as the request. */
static double lifetime(const Request *request) {
    const Core *core = request->core;
    if (!__atomic_load_n(&core->mutex->is_slow, __ATOMIC_RELAXED))
        return core->lifetime_s;
    double left_s = core->lifetime_s - (double)(now_ns() - request->began_ns) / 1e9;
    return left_s > 0 ? left_s : 0;
}

/* For how long what a name means may be believed. */
double name_lifetime(const Request *request, const Place *place) {
    return request->is_fickle || is_changed(request, place->node) ? 0 : lifetime(request);
}

/* Whether what was seen of a node is so still, as far as we know, and attributes on its device may be believed. */
static bool may_last(const Request *request, const Node *node) {
    return !request->is_unasked && !is_changed(request, node);
}

/* The number of a node in struct fuse_entry_out. */
void put_number(char *to, uint64_t nodeid) {
    put64(to, nodeid);
    put64(to + 40, nodeid);
}

/* struct fuse_entry_out, of a name that is believed for so long. Returns for how long all of it is. */
double put_entry_for(Request *request, char *to, Node *node, const Seen *seen, bool is_steady, double name_s) {
    Core *core = request->core;
    double attributes_s = attr_s(request, node, seen, name_s, is_steady && may_last(request, node));
    put64(to, node->nodeid);
    put64(to + 8, 0);
    put_time(to + 16, to + 32, name_s);
    put_time(to + 24, to + 36, attributes_s);
    put_attributes(to + 40, is_root(core, node) ? seen->ino : node->nodeid, seen);
    return attributes_s < name_s ? attributes_s : name_s;
}

/* That nothing has a name, which is believed for so long. */
int put_missing(Request *request, double name_s) {
    memset(request->answer, 0, ENTRY_BYTES);
    put_time(request->answer + 16, request->answer + 32, name_s);
    return ENTRY_BYTES;
}

/* struct fuse_attr_out. Returns how many bytes. */
int put_attr(Request *request, Node *node, const Seen *seen, bool is_steady) {
    Core *core = request->core;
    double timeout_s = request->is_fickle ? 0 : lifetime(request);
    double attributes_s = attr_s(request, node, seen, timeout_s, is_steady && may_last(request, node));
    put_time(request->answer, request->answer + 8, attributes_s);
    put32(request->answer + 12, 0);
    put_attributes(request->answer + 16, is_root(core, node) ? seen->ino : node->nodeid, seen);
    return ATTR_BYTES;
}
