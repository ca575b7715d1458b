/* The module. */
#include "bulk.h"

static PyMethodDef methods[] = {
    {"read", bulk_read, METH_VARARGS, "Some of a directory: names with such ends joined by slashes, inode numbers, kinds, n."},
    {"look", bulk_look, METH_VARARGS, "Names that bounds choose, their lengths, their spaces, and names to be looked at."},
    {"unlink", bulk_unlink, METH_VARARGS, "unlinkat of each name: those that it refused, with the errno."},
    {"unlink_chosen", bulk_unlink_chosen, METH_VARARGS,
     "unlinkat of each name that bounds choose: how many went, their length and space, those refused, those unsure."},
    {"rename", bulk_rename, METH_VARARGS, "renameat2 of each name to the same elsewhere: those that it refused."},
    {"window", bulk_window, METH_VARARGS, "The first entries of a directory: names in bundles, subdirectories, if all."},
    {"read_files", bulk_read_files, METH_VARARGS, "NAME/TAIL of each directory: its bytes; None of what is no small plain file."},
    {"lacking", bulk_lacking, METH_VARARGS, "The directories in which TAIL can't be opened, with the errno."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_bulk", .m_doc = "Calls for many names; see bulk.h.", .m_methods = methods,
};

PyMODINIT_FUNC PyInit__bulk(void) { return PyModule_Create(&module); }
