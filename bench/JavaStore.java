import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.config.BrokerRole;
import org.apache.rocketmq.store.config.FlushDiskType;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/**
 * Apache RocketMQ's own store, which one thread puts messages with a tag and two keys into: each is built as a broker
 * does and given to `putMessage`, ASYNC_FLUSH.
 *
 * <p>Arguments: a new folder, a file of bodies, the length of a body, the number of messages, and the number of small ones
 * that go before and do not count, so that the code is compiled by then. It prints `ready`, waits for a line, puts, and
 * prints how many messages were put.
 */
public final class JavaStore {
    private static final InetSocketAddress HOST = new InetSocketAddress("127.0.0.1", 10911);

    public static void main(String[] args) throws Exception {
        byte[] pool = Files.readAllBytes(Path.of(args[1]));
        int length = Integer.parseInt(args[2]);
        byte[][] bodies = new byte[pool.length / length][];
        for (int i = 0; i < bodies.length; i++) {
            bodies[i] = Arrays.copyOfRange(pool, i * length, (i + 1) * length);
        }
        DefaultMessageStore store = open(args[0]);
        put(store, new byte[][] {new byte[16]}, Integer.parseInt(args[4]));
        System.out.println("ready");
        System.in.read();
        System.out.println(put(store, bodies, Integer.parseInt(args[3])));
        store.shutdown();
        Runtime.getRuntime().halt(0);  // Some of its threads would keep it alive.
    }

    private static DefaultMessageStore open(String path) throws Exception {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(path);
        config.setStorePathCommitLog(path + "/commitlog");
        config.setBrokerRole(BrokerRole.ASYNC_MASTER);
        config.setFlushDiskType(FlushDiskType.ASYNC_FLUSH);
        try (ServerSocket free = new ServerSocket(0)) {
            config.setHaListenPort(free.getLocalPort());
        }
        DefaultMessageStore store = new DefaultMessageStore(
            config, new BrokerStatsManager("bench", true),
            (topic, queueId, logicOffset, tagsCode, msgStoreTime, filterBitMap, properties) -> { },
            new BrokerConfig(), new ConcurrentHashMap<>());
        if (!store.load()) {
            throw new IllegalStateException("load() returns false");
        }
        store.start();
        return store;
    }

    private static int put(DefaultMessageStore store, byte[][] bodies, int messages) {
        for (int i = 0; i < messages; i++) {
            MessageExtBrokerInner message = new MessageExtBrokerInner();
            message.setTopic("bench");
            message.setQueueId(0);
            message.setBody(bodies[i % bodies.length]);
            message.setTags("paid");
            message.setKeys("o-7 c-9");
            message.setTagsCode(MessageExtBrokerInner.tagsString2tagsCode(message.getTags()));
            message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
            message.setBornTimestamp(System.currentTimeMillis());
            message.setBornHost(HOST);
            message.setStoreHost(HOST);
            PutMessageResult result = store.putMessage(message);
            if (!result.isOk()) {
                throw new IllegalStateException(result.toString());
            }
        }
        return messages;
    }
}
