/* Reads bytes of files by a call: the counterpart of reading them through a mapping. */

#include "native.h"

#include <errno.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/vfs.h>
#endif

/* read_at(fds, positions, sizes) -> the bytes at each position of each file, concatenated; None if a file ends before, or cannot
   be read. All three are int64. The caller has compared the sizes with the files' lengths. */
PyObject *native_read_at(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *result = NULL;
    Buffers held = {0};
    Py_buffer *fds, *positions, *sizes;
    if (!(fds = hold(&held, args[0], 8, -1, false, "fds")))
        goto done;
    Py_ssize_t count = fds->len / 8, total = 0, i = 0;
    if (!(positions = hold(&held, args[1], 8, count, false, "positions")) ||
        !(sizes = hold(&held, args[2], 8, count, false, "sizes")))
        goto done;
    const int64_t *fd = fds->buf, *at = positions->buf, *size = sizes->buf;
    for (; i < count; i++)
        if (size[i] < 0 || at[i] < 0 || __builtin_add_overflow(total, size[i], &total)) {
            PyErr_Format(PyExc_ValueError, "read_at: %lld bytes at %lld", (long long)size[i], (long long)at[i]);
            goto done;
        }
    if (!(result = PyBytes_FromStringAndSize(NULL, total)))
        goto done;
    char *to = PyBytes_AS_STRING(result);
    PyThreadState *others = PyEval_SaveThread();
    for (i = 0; i < count; i++)
        for (int64_t got = 0; got < size[i];) {
            ssize_t more = pread((int)fd[i], to, (size_t)(size[i] - got), (off_t)(at[i] + got));
            if (more <= 0) {
                if (more < 0 && errno == EINTR)
                    continue;
                goto failed;
            }
            got += more;
            to += more;
        }
failed:
    PyEval_RestoreThread(others);
    if (i < count)
        Py_SETREF(result, Py_NewRef(Py_None));
done:
    let_go(&held);
    return result;
}

/* Return true if the file system is known to consider the page cache, too, when it is asked for holes. */
static bool reports_holes(int fd)
{
#ifdef __linux__
    enum { EXT4 = 0xEF53, XFS = 0x58465342, TMPFS = 0x01021994 };
    struct statfs system;
    return !fstatfs(fd, &system) && (system.f_type == EXT4 || system.f_type == XFS || system.f_type == TMPFS);
#else
    return false;
#endif
}

/* data_end(fd, start, end) -> a position in the range after which the file has only holes, and blocks that were allocated but
   never written. They read as zeros, and reading them would fill the page cache with zeros. `end` if that is not known. */
PyObject *native_data_end(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { PATIENCE = 1 << 14 }; /* covers a segment with data in every second page. On a full tmpfs reading a hole is SIGBUS */
    long fd = PyLong_AsLong(args[0]);
    int64_t start = PyLong_AsLongLong(args[1]), end = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    int64_t found = end;
    PyThreadState *others = PyEval_SaveThread();
    if (reports_holes((int)fd)) {
        int64_t last = start, at = start;
        for (int left = PATIENCE; left && last < end; left--) {
            int64_t data = lseek((int)fd, (off_t)at, SEEK_DATA);
            if (data < 0 ? errno == ENXIO : data >= end) {
                found = last;
                break;
            }
            if (data < 0 || (at = lseek((int)fd, (off_t)data, SEEK_HOLE)) < 0)
                break;
            last = at;
        }
    }
    PyEval_RestoreThread(others);
    return PyLong_FromLongLong(found < end ? found : end);
}
