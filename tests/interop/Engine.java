import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import com.alibaba.fastjson2.JSONWriter;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.ConfigManager;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.common.sysflag.MessageSysFlag;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyRemotingClient;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RequestCode;
import org.apache.rocketmq.remoting.protocol.header.EndTransactionRequestHeader;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.MessageArrivingListener;
import org.apache.rocketmq.store.MessageStore;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.RocksDBMessageStore;
import org.apache.rocketmq.store.config.BrokerRole;
import org.apache.rocketmq.store.config.FlushDiskType;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.queue.ConsumeQueueInterface;
import org.apache.rocketmq.store.queue.CqUnit;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/**
 * Apache RocketMQ's own engine, asked line by line: a JSON object comes in, a JSON object goes out.
 *
 * <p>It decides nothing. What it says of a store is what `DefaultMessageStore`, or a whole broker around it, says.
 */
public final class Engine {
    private final PrintStream out;
    private MessageStore store;
    private BrokerController broker;

    private Engine(PrintStream out) {
        this.out = out;
    }

    public static void main(String[] args) throws Exception {
        Engine engine = new Engine(System.out);
        System.setOut(System.err);  // Whatever else the broker prints is none of our lines.
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            engine.answer(JSON.parseObject(line));
        }
        Runtime.getRuntime().halt(0);  // Some of its threads would keep it alive.
    }

    private void answer(JSONObject asked) {
        JSONObject said = new JSONObject();
        try {
            said.put("said", perform(asked));
        } catch (Throwable error) {
            error.printStackTrace();
            said.put("error", error.toString());
        }
        out.println(said.toString(JSONWriter.Feature.WriteMapNullValue));
        out.flush();
    }

    private Object perform(JSONObject asked) throws Exception {
        switch (asked.getString("do")) {
            case "open":
                return open(asked);
            case "broker":
                return startBroker(asked);
            case "put":
                return put(asked);
            case "delete_topics":
                return deleteTopics(asked);
            case "bounds":
                return Map.of("min", store.getMinPhyOffset(), "max", store.getMaxPhyOffset());
            case "queues":
                return queues();
            case "messages":
                return messages(asked);
            case "units":
                return units(asked);
            case "query":
                return query(asked);
            case "at_time":
                return store.getOffsetInQueueByTime(
                    asked.getString("topic"), asked.getIntValue("queue_id"), asked.getLongValue("timestamp_ms"),
                    asked.getBooleanValue("last") ? BoundaryType.UPPER : BoundaryType.LOWER);
            case "config":
                return config();
            case "order":
                return order(asked);
            case "settle":
                return settleOrdered(asked);
            case "end_transaction":
                return endTransaction(asked);
            case "commit":
                broker.getConsumerOffsetManager().commitOffset(
                    "interop", asked.getString("group"), asked.getString("topic"), asked.getIntValue("queue_id"),
                    asked.getLongValue("offset"));
                return true;
            case "close":
                return close();
            case "halt":
                Runtime.getRuntime().halt(1);
                return null;
            default:
                throw new IllegalArgumentException("no such thing to do: " + asked);
        }
    }

    // --- opening -----------------------------------------------------------------------------------------------------

    private static MessageStoreConfig configOf(JSONObject asked) {
        MessageStoreConfig config = new MessageStoreConfig();
        String path = asked.getString("path");
        config.setStorePathRootDir(path);
        config.setStorePathCommitLog(path + "/commitlog");
        config.setMappedFileSizeCommitLog(asked.getIntValue("segment_bytes"));
        config.setMappedFileSizeConsumeQueue(20 * asked.getIntValue("consumequeue_units"));
        config.setMaxHashSlotNum(asked.getIntValue("index_slots"));
        config.setMaxIndexNum(asked.getIntValue("index_entries"));
        config.setBrokerRole(BrokerRole.ASYNC_MASTER);
        config.setFlushDiskType(FlushDiskType.ASYNC_FLUSH);
        config.setHaListenPort(asked.getIntValue("ha_port"));
        config.setDiskMaxUsedSpaceRatio(99);  // Nothing is dropped because somebody else filled the disk.
        config.setMaxMessageSize(1 << 20);
        Properties settings = new Properties();
        settings.putAll(asked.getObject("settings", Map.class));
        MixAll.properties2Object(settings, config);
        return config;
    }

    /** `load` and `start`, as a broker does; what was not dispatched is, before this returns. */
    private Object open(JSONObject asked) throws Exception {
        ConcurrentHashMap<String, TopicConfig> topics = new ConcurrentHashMap<>();
        for (Object name : asked.getJSONArray("batch_topics")) {
            TopicConfig topic = new TopicConfig((String) name, 1, 1);
            topic.getAttributes().put("queue.type", "BatchCQ");
            topics.put((String) name, topic);
        }
        MessageArrivingListener nobody =
            (topic, queueId, logicOffset, tagsCode, msgStoreTime, filterBitMap, properties) -> { };
        BrokerStatsManager statistics = new BrokerStatsManager("interop", true);
        MessageStoreConfig config = configOf(asked);
        DefaultMessageStore opened = config.getStoreType().equals("defaultRocksDB")
            ? new RocksDBMessageStore(config, statistics, nobody, new BrokerConfig(), topics)
            : new DefaultMessageStore(config, statistics, nobody, new BrokerConfig(), topics);
        if (!opened.load()) {
            opened.shutdown();
            throw new IllegalStateException("load() says false");
        }
        opened.start();
        store = opened;
        settle();
        return true;
    }

    private Object startBroker(JSONObject asked) throws Exception {
        BrokerConfig brokerConfig = new BrokerConfig();
        brokerConfig.setBrokerName("interop");
        brokerConfig.setBrokerClusterName("interop");
        brokerConfig.setBrokerIP1("127.0.0.1");
        brokerConfig.setEnableCalcFilterBitMap(false);
        NettyServerConfig server = new NettyServerConfig();
        server.setBindAddress("127.0.0.1");
        server.setListenPort(asked.getIntValue("port"));
        MessageStoreConfig config = configOf(asked);
        config.setTimerWheelEnable(true);
        config.setTimerPrecisionMs(1000);
        broker = new BrokerController(brokerConfig, server, new NettyClientConfig(), config);
        if (!broker.initialize()) {
            throw new IllegalStateException("initialize() says false");
        }
        broker.start();
        store = broker.getMessageStore();
        settle();
        return true;
    }

    private void settle() throws InterruptedException {
        while (store.dispatchBehindBytes() > 0) {
            Thread.sleep(1);
        }
    }

    private Object close() {
        if (broker != null) {
            broker.shutdown();
        } else {
            store.shutdown();
        }
        broker = null;
        store = null;
        return true;
    }

    // --- messages ----------------------------------------------------------------------------------------------------

    private Object put(JSONObject asked) throws Exception {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        message.setTopic(asked.getString("topic"));
        message.setQueueId(asked.getIntValue("queue_id"));
        message.setBody(Base64.getDecoder().decode(asked.getString("body")));
        JSONObject properties = asked.getJSONObject("properties");
        for (String name : properties.keySet()) {
            MessageAccessorBridge.put(message, name, properties.getString(name));
        }
        message.setFlag(asked.getIntValue("flag"));
        if (properties.containsKey("INNER_NUM")) {
            message.setSysFlag(MessageSysFlag.INNER_BATCH_FLAG | MessageSysFlag.NEED_UNWRAP_FLAG);
        }
        message.setTagsCode(MessageExtBrokerInner.tagsString2tagsCode(message.getTags()));
        message.setBornTimestamp(System.currentTimeMillis());
        SocketAddress host = new InetSocketAddress("127.0.0.1", 10911);
        message.setBornHost(host);
        message.setStoreHost(host);
        message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
        PutMessageResult result = store.putMessage(message);
        settle();
        if (!result.isOk()) {
            throw new IllegalStateException(result.toString());
        }
        return Map.of(
            "queue_offset", result.getAppendMessageResult().getLogicsOffset(),
            "physical_offset", result.getAppendMessageResult().getWroteOffset());
    }

    /** As a broker does it: the topic's settings, then its queues. What it had in the log stays there. */
    private Object deleteTopics(JSONObject asked) {
        Set<String> topics = new TreeSet<>(asked.getJSONArray("topics").toJavaList(String.class));
        if (broker != null) {
            topics.forEach(broker.getTopicConfigManager()::deleteTopicConfig);
        }
        return store.deleteTopics(topics);
    }

    /** Properties can be set by anybody; the method of the class that does it is not public. */
    private static final class MessageAccessorBridge extends org.apache.rocketmq.common.message.MessageAccessor {
        static void put(MessageExt message, String name, String value) {
            putProperty(message, name, value);
        }
    }

    private Object queues() {
        JSONArray lines = new JSONArray();
        store.getQueueStore().getConsumeQueueTable().forEach((topic, queues) -> queues.forEach((queueId, queue) -> {
            JSONObject line = new JSONObject();
            line.put("topic", topic);
            line.put("queue_id", queueId);
            line.put("min_offset", queue.getMinOffsetInQueue());
            line.put("max_offset", queue.getMaxOffsetInQueue());
            lines.add(line);
        }));
        return lines;
    }

    /** A queue from end to end by `getMessage`, the way a consumer goes. */
    private Object messages(JSONObject asked) throws Exception {
        String topic = asked.getString("topic");
        int queueId = asked.getIntValue("queue_id");
        JSONArray lines = new JSONArray();
        long offset = store.getMinOffsetInQueue(topic, queueId);
        while (offset < store.getMaxOffsetInQueue(topic, queueId)) {
            GetMessageResult result = store.getMessage("interop", topic, queueId, offset, 32, null);
            try {
                if (result.getNextBeginOffset() <= offset) {
                    throw new IllegalStateException("stuck at " + offset + ": " + result);
                }
                for (ByteBuffer record : result.getMessageBufferList()) {
                    lines.add(line(record));
                }
                offset = result.getNextBeginOffset();
            } finally {
                result.release();
            }
        }
        return lines;
    }

    private static JSONObject line(ByteBuffer record) throws Exception {
        MessageExt message = MessageDecoder.decode(record.slice(), true, true);
        JSONObject line = new JSONObject();
        line.put("topic", message.getTopic());
        line.put("queue_id", message.getQueueId());
        line.put("queue_offset", message.getQueueOffset());
        line.put("physical_offset", message.getCommitLogOffset());
        line.put("size", message.getStoreSize());
        line.put("tags", message.getTags());
        line.put("keys", message.getKeys());
        line.put("properties", new TreeMap<>(message.getProperties()));
        line.put("flag", message.getFlag());
        line.put("sys_flag", record.getInt(record.position() + 36));  // The decoder takes a bit off when it inflates.
        line.put("born_timestamp_ms", message.getBornTimestamp());
        line.put("born_host", host(message.getBornHost()));
        line.put("store_timestamp_ms", message.getStoreTimestamp());
        line.put("store_host", host(message.getStoreHost()));
        line.put("reconsume_times", message.getReconsumeTimes());
        line.put("prepared_transaction_offset", message.getPreparedTransactionOffset());
        line.put("message_id", message.getMsgId());
        line.put("unique_key", message.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX));
        byte[] body = message.getBody();  // null for one without bytes
        line.put("body", body == null ? "" : Base64.getEncoder().encodeToString(body));
        return line;
    }

    private static String host(SocketAddress address) {
        InetSocketAddress host = (InetSocketAddress) address;
        return host.getAddress().getHostAddress() + ":" + host.getPort();
    }

    /** Units as the queue has them: physical offset, size, tags code. */
    private Object units(JSONObject asked) {
        ConsumeQueueInterface queue =
            store.getQueueStore().findOrCreateConsumeQueue(asked.getString("topic"), asked.getIntValue("queue_id"));
        JSONArray units = new JSONArray();
        for (long offset = queue.getMinOffsetInQueue(); offset < queue.getMaxOffsetInQueue(); offset++) {
            CqUnit unit = queue.get(offset);
            units.add(unit == null ? null : List.of(unit.getPos(), unit.getSize(), unit.getTagsCode()));
        }
        return units;
    }

    private Object query(JSONObject asked) throws Exception {
        QueryMessageResult result = store.queryMessage(
            asked.getString("topic"), asked.getString("key"), asked.getIntValue("limit"),
            asked.getLongValue("begin_ms"), asked.getLongValue("end_ms"));
        JSONArray offsets = new JSONArray();
        try {
            for (ByteBuffer record : result.getMessageBufferList()) {
                offsets.add(line(record).get("physical_offset"));
            }
        } finally {
            result.release();
        }
        return offsets;
    }

    // --- a broker's tables -------------------------------------------------------------------------------------------

    private Object config() {
        JSONObject tables = new JSONObject();
        tables.put("topics", table(broker.getTopicConfigManager()));
        tables.put("groups", table(broker.getSubscriptionGroupManager()));
        tables.put("offsets", table(broker.getConsumerOffsetManager()));
        tables.put("delay", table(broker.getScheduleMessageService()));
        tables.put("order", table((ConfigManager) (Object) broker.getConsumerOrderInfoManager()));
        return tables;
    }

    /** As the broker would write it: in its own dialect of JSON. */
    private static String table(ConfigManager manager) {
        return manager.encode(true);
    }

    /** Whether the next pop in order would be held back, as the broker asks before it pops. */
    private Object order(JSONObject asked) {
        return broker.getConsumerOrderInfoManager().checkBlock(
            asked.getString("attempt_id"), asked.getString("topic"), asked.getString("group"),
            asked.getIntValue("queue_id"), asked.getLongValue("invisible_ms"));
    }

    /** An acknowledgement of a pop in order, as `AckMessageProcessor` does it. */
    private Object settleOrdered(JSONObject asked) {
        String topic = asked.getString("topic");
        String group = asked.getString("group");
        int queueId = asked.getIntValue("queue_id");
        long next = broker.getConsumerOrderInfoManager().commitAndNext(
            topic, group, queueId, asked.getLongValue("offset"), asked.getLongValue("pop_time_ms"));
        if (next >= 0) {
            broker.getConsumerOffsetManager().commitOffset("interop", group, topic, queueId, next);
        }
        return next;
    }

    /** What a producer asks at the end of its transaction, over the broker's socket. */
    private Object endTransaction(JSONObject asked) throws Exception {
        EndTransactionRequestHeader header = new EndTransactionRequestHeader();
        header.setProducerGroup(asked.getString("producer_group"));
        header.setTranStateTableOffset(asked.getLong("queue_offset"));
        header.setCommitLogOffset(asked.getLong("physical_offset"));
        header.setMsgId(asked.getString("unique_key"));
        header.setTransactionId(asked.getString("unique_key"));
        header.setFromTransactionCheck(false);
        header.setCommitOrRollback(
            asked.getBooleanValue("commit")
                ? MessageSysFlag.TRANSACTION_COMMIT_TYPE : MessageSysFlag.TRANSACTION_ROLLBACK_TYPE);
        RemotingCommand request = RemotingCommand.createRequestCommand(RequestCode.END_TRANSACTION, header);
        request.makeCustomHeaderToNet();
        NettyRemotingClient client = new NettyRemotingClient(new NettyClientConfig());
        client.start();
        try {
            RemotingCommand answer = client.invokeSync(broker.getBrokerAddr(), request, 10_000);
            settle();
            return answer.getCode();
        } finally {
            client.shutdown();
        }
    }
}
