/* Answers, put into the entry's memory: struct fuse_entry_out and fuse_attr_out, and for how long they are believed. */
#include "core.h"

static const double SHORT_S = 1.0; /* as in validity.py */

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
static double attr_s(const Core *core, Node *node, const Seen *seen, double timeout_s, bool is_steady) {
    bool is_set = seen->mode & S_ISUID || (seen->mode & S_ISGID && seen->mode & S_IXGRP);
    if (!is_steady || (is_set && S_ISREG(seen->mode)))
        return 0;
    if (timeout_s <= SHORT_S)
        return timeout_s;
    if (S_ISDIR(seen->mode))
        return lasts(core, node) ? timeout_s : SHORT_S;
    return seen->nlink > 1 ? SHORT_S : timeout_s;
}

/* Whether what was seen of a node is so still, as far as we know. */
static bool may_last(const Request *request, const Node *node) { return !is_changed(request, node); }

/* struct fuse_entry_out, of a name that is believed for so long. Returns for how long all of it is. */
double put_entry_for(Request *request, char *to, Node *node, const Seen *seen, bool is_steady, double name_s) {
    Core *core = request->core;
    double attributes_s = attr_s(core, node, seen, name_s, is_steady && may_last(request, node));
    put64(to, node->nodeid);
    put64(to + 8, 0);
    put_time(to + 16, to + 32, name_s);
    put_time(to + 24, to + 36, attributes_s);
    put_attributes(to + 40, is_root(core, node) ? seen->ino : node->nodeid, seen);
    return attributes_s < name_s ? attributes_s : name_s;
}

/* The same of any other name. Returns how many bytes. */
int put_entry(Request *request, char *to, Node *node, const Seen *seen, bool is_steady) {
    put_entry_for(request, to, node, seen, is_steady, request->core->lifetime_s);
    return ENTRY_BYTES;
}

/* That nothing has a name. */
int put_missing(Request *request) {
    memset(request->answer, 0, ENTRY_BYTES);
    put_time(request->answer + 16, request->answer + 32, request->core->lifetime_s);
    return ENTRY_BYTES;
}

/* struct fuse_attr_out. Returns how many bytes. */
int put_attr(Request *request, Node *node, const Seen *seen, bool is_steady) {
    Core *core = request->core;
    double timeout_s = core->lifetime_s;
    double attributes_s = attr_s(core, node, seen, timeout_s, is_steady && may_last(request, node));
    put_time(request->answer, request->answer + 8, attributes_s);
    put32(request->answer + 12, 0);
    put_attributes(request->answer + 16, is_root(core, node) ? seen->ino : node->nodeid, seen);
    return ATTR_BYTES;
}
