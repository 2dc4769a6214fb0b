/* Opening by the rule for paths: the counterpart of mqstore/files/safe_open.py, which describes the rule and its reason. */

#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

/* Open a path without following any link, by the system's own rule; -1 with an errno. */
static int open_strictly(const char *name, int flags, int mode)
{
#if defined(__linux__)
    enum { SYS_OPENAT2 = 437, NO_SYMLINKS = 4 };
    struct { uint64_t flags, mode, resolve; } how = {(uint64_t)flags, flags & O_CREAT ? (uint64_t)mode : 0, NO_SYMLINKS};
    return (int)syscall(SYS_OPENAT2, AT_FDCWD, name, &how, sizeof how);
#elif defined(O_NOFOLLOW_ANY) /* macOS */
    return open(name, (flags & ~O_NOFOLLOW) | O_NOFOLLOW_ANY, mode);
#else
    errno = ENOSYS;
    return -1;
#endif
}

static bool is_file(int found, const struct stat *status)
{
    return found == 0 && S_ISREG(status->st_mode);
}

enum {
    WRITES = O_WRONLY | O_RDWR | O_CREAT | O_TRUNC | O_APPEND,
    CAREFUL = O_CLOEXEC | O_NONBLOCK | O_NOCTTY,
};

/* open_beneath(path, flags, mode, folder) -> a descriptor, or a negative errno: then nothing was done, and the caller repeats the
   call in Python, which raises the error. `folder`: a folder whose path has no link; otherwise a file by the whole rule. */
PyObject *native_open_beneath(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    int flags = (int)PyLong_AsLong(args[1]), mode = (int)PyLong_AsLong(args[2]);
    bool file = args[3] != Py_True, strict = !file || flags & WRITES;
    PyObject *path;
    if (PyErr_Occurred() || !PyUnicode_FSConverter(args[0], &path))
        return NULL;
    if (file)
        flags |= CAREFUL;
    const char *name = PyBytes_AS_STRING(path);
    struct stat status;
    int fd = -1, number = 0;
    PyThreadState *others = PyEval_SaveThread();
    if (file && !(flags & O_EXCL)) {
        int found = strict || flags & O_NOFOLLOW ? lstat(name, &status) : stat(name, &status);
        if (!is_file(found, &status) && !(found < 0 && errno == ENOENT && flags & O_CREAT))
            number = found < 0 ? errno : EINVAL;
    }
    if (!number) {
        fd = strict ? open_strictly(name, flags, mode) : open(name, flags, mode);
        if (fd < 0)
            number = errno;
        else if (file && !is_file(fstat(fd, &status), &status)) {
            close(fd);
            number = EINVAL;
        }
    }
    PyEval_RestoreThread(others);
    Py_DECREF(path);
    return PyLong_FromLong(number ? -number : fd);
}
